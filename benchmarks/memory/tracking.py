"""Bytes in tensors' storages over a step, by what they hold.

A dispatch mode sees every operator. Before and after each one it looks at all storages that any operator has met and
that are still alive, and notes those whose size has changed: so storages that are resized to nothing count as nothing.
Not seen is what lives and dies inside one operator, or inside the process group's backend; `allocated` sees that too,
but not what it is for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp2._torch.plan import MemoryMode

PRODUCTS = {"mm", "addmm", "bmm"}  # there are equally many in every peer's step: a clock that they share


class Kind(IntEnum):
    """What a storage holds. If several are right, the first: a gradient that is sent in place is a gradient."""

    SHARD = 0
    PARAMETER = 1
    GRADIENT = 2
    COMMUNICATION = 3
    OTHER = 4


@dataclass
class Holding:
    """One storage: what it holds, and (when, bytes) of every change."""

    kind: Kind = Kind.OTHER
    changes: list[tuple[int, int]] = field(default_factory=list)


class Tracker(MemoryMode):
    """While active, follows all storages on the CPU. Time is counted in operators.

    Attributes:
        holdings: of all storages, dead ones too.
        products: number of matrix products that had begun, at each moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holdings: list[Holding] = []
        self.products = [0]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Holding]] = {}
        self._hooked: set[int] = set()

    @property
    def now(self) -> int:
        return len(self.products) - 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = self.as_without(function, args)
        kind = Kind.COMMUNICATION if function.namespace == "c10d" else Kind.OTHER
        for leaf in tree_leaves((args, kwargs)):
            self.mark(leaf, kind)
        self._tick(function.__name__.partition(".")[0] in PRODUCTS)
        result = function(*args, **kwargs)
        for leaf in tree_leaves(result):
            self.mark(leaf, kind)
        self._tick(False)
        self.products.append(self.products[-1])  # what dies now was alive together with the result
        return result

    def mark(self, tensor: Any, kind: Kind) -> None:
        """`tensor`'s storage, if it is a tensor, holds that; or what was said before, if that comes first in `Kind`."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        known = self._alive.get(id(storage))
        if known is None:
            key, holding = id(storage), Holding()
            self.holdings.append(holding)
            self._alive[key] = weakref.ref(storage, lambda _: self._died(key)), holding
        else:
            holding = known[1]
        holding.kind = min(holding.kind, kind)

    def _died(self, key: int) -> None:
        _, holding = self._alive.pop(key)
        holding.changes.append((self.now, 0))

    def _tick(self, is_product: bool) -> None:
        self.products.append(self.products[-1] + is_product)
        for reference, holding in list(self._alive.values()):
            storage = reference()
            nbytes = storage.nbytes() if storage is not None else 0
            if nbytes != (holding.changes[-1][1] if holding.changes else 0):
                holding.changes.append((self.now, nbytes))

    # --- what is a parameter, what a gradient -------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """Whatever modules below `module` compute with from now on are parameters, and their gradients gradients."""
        for each in module.modules():
            each.register_forward_hook(lambda each, args, output: self._computed_with(each.parameters(recurse=False)))

    def _computed_with(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            self.mark(param, Kind.PARAMETER)
            leaf = _leaf(param)
            for tensor in {id(param): param, id(leaf): leaf}.values():
                if tensor.requires_grad and id(tensor) not in self._hooked:
                    if tensor.is_leaf:  # its hook is there in the next step too
                        self._hooked.add(id(tensor))
                    tensor.register_hook(lambda grad: self.mark(grad, Kind.GRADIENT))


def _leaf(param: torch.Tensor) -> torch.Tensor:
    """What autograd accumulates the gradient of: FSDP1's parameters are views of a flat one."""
    node = param.grad_fn
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
    return param if node is None else node.variable


@dataclass(frozen=True)
class Moment:
    """Bytes of each kind after so many matrix products."""

    products: int
    nbytes: tuple[int, ...]


def timeline(tracker: Tracker, since: int, until: int) -> list[Moment]:
    """Every moment from `since` to `until` at which something changed."""
    changes: dict[int, list[tuple[Kind, int]]] = {since: []}
    total = [0] * len(Kind)
    for holding in tracker.holdings:
        before = 0
        for when, nbytes in holding.changes:
            if when <= since:
                total[holding.kind] += nbytes - before
            elif when <= until:
                changes.setdefault(when, []).append((holding.kind, nbytes - before))
            before = nbytes
    moments = []
    for when in sorted(changes):
        for kind, difference in changes[when]:
            total[kind] += difference
        moments.append(Moment(tracker.products[when] - tracker.products[since], tuple(total)))
    return moments


def allocated(step: Callable[[], None]) -> int:
    """Most bytes that torch's allocator had given out during `step`, beyond those before: operators' own temporary
    memory and the backend's staging included, on all threads."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
