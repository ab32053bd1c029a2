"""`Memory`: bytes in tensors' storages over a step, by kind. Layer: plan.

A storage counts from its creation until it is freed, and its size may change (`FlatStorage`). Its kind may become known
later, for example when a buffer is sent, and then applies to its whole life. If several kinds apply, the first of
`Kind` counts: a gradient that is sent in place is a gradient.
"""

import weakref
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.runtime.root import units_below
from fsdp2.runtime.tree import tensors_in
from fsdp2.trace.timeline import Sample

__all__ = ["Kind", "Memory"]


class Kind(StrEnum):
    """What a storage holds."""

    PARAMETERS = "parameters and buffers"
    STATES = "optimizer states"
    UNSHARDED = "unsharded units"
    GRADIENTS = "gradients"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations and the rest"


_ORDER = list(Kind)


@dataclass(eq=False)
class Holding:
    """One storage: its kind, and (number of the operator, seconds, bytes) at each change."""

    storage: weakref.ref[torch.UntypedStorage]
    is_host: bool
    kind: Kind = Kind.ACTIVATIONS
    changes: list[tuple[int, float, int]] = field(default_factory=list)


class Memory:
    """Follows storages from the first operator that uses them.

    Args:
        host: the device that stands for host memory.

    Attributes:
        tick: the number of the running operator.
        seconds: the current time, set by the caller.
    """

    def __init__(self, host: torch.device):
        self.tick = 0
        self.seconds = 0.0
        self._host = host
        self._holdings: list[Holding] = []
        self._alive: dict[int, Holding] = {}
        self._elastic: list[Holding] = []

    def mark(self, tensor: object, kind: Kind = Kind.ACTIVATIONS, elastic: bool = False) -> None:
        """Set the kind of `tensor`'s storage, if it is a tensor. An elastic storage may be resized: its size is checked
        after every operator."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._alive.get(key)
        if known is None:
            known = Holding(weakref.ref(storage, lambda _: self._died(key)), tensor.device == self._host)
            known.changes.append((self.tick, self.seconds, storage.nbytes()))
            self._holdings.append(known)
            self._alive[key] = known
        known.kind = min(known.kind, kind, key=_ORDER.index)
        if elastic and known not in self._elastic:
            self._elastic.append(known)

    def mark_what_stays(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After a first step: mark the optimizer's state, and the memory that units gather into, which stay."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.mark(tensor, Kind.PARAMETERS)
        for leaf in tensors_in(dict(enumerate(optimizer.state.values()))):
            self.mark(leaf, Kind.STATES)
        for unit in units_below(model):
            for param in (param for group in unit.groups for param in group.params):
                if param.unsharded is None:
                    continue
                self.mark(param.unsharded, Kind.UNSHARDED, elastic=True)
                if param.unsharded.requires_grad:
                    param.unsharded.register_hook(lambda grad: self.mark(grad, Kind.GRADIENTS))

    def record_sizes(self) -> None:
        """Record storages that were resized."""
        for known in self._elastic:
            storage = known.storage()
            if storage is not None and (nbytes := storage.nbytes()) != known.changes[-1][2]:
                known.changes.append((self.tick, self.seconds, nbytes))

    def _died(self, key: int) -> None:
        known = self._alive.pop(key)
        known.changes.append((self.tick, self.seconds, 0))

    def samples(self, since: int, is_host: bool = False) -> list[Sample]:
        """Bytes by kind after each change from operator `since` on."""
        changes: dict[int, list[tuple[float, Kind, int]]] = {since: []}
        for holding in self._holdings:
            before = 0
            for tick, seconds, nbytes in holding.changes if holding.is_host == is_host else ():
                changes.setdefault(max(tick, since), []).append((seconds, holding.kind, nbytes - before))
                before = nbytes
        total, samples = dict.fromkeys(Kind, 0), []
        for tick in sorted(changes):
            for _, kind, difference in changes[tick]:
                total[kind] += difference
            at = changes[tick][0][0] if tick > since else 0.0
            samples.append(Sample(at, {str(kind): nbytes for kind, nbytes in total.items()}))
        return samples
