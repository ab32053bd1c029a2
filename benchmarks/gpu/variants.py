"""The ways to train that are compared, and which lane each setting of fsdp2 takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2.comm
from benchmarks.gpu.groups import BACKEND
from benchmarks.gpu.model import Llama, Shape, loss_of
from fsdp2.comm.base import Comm
from fsdp2.comm.flat import FlatComm, NcclComm


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        wrap: shards a model in place, in the way of this variant.
        lanes: the `Comm` of fsdp2 on the group at hand.
        autocasts: computes in bf16 by autocast.
        narrow: all parameters are bf16: what compute alone would take, not a way to train.
    """

    wrap: Callable[[Llama], nn.Module]
    lanes: Comm | None = None
    autocasts: bool = False
    narrow: bool = False


def direct(min_bytes: int) -> NcclComm:
    """Coalesced collectives, in which shards of at least `min_bytes` have an operand of their own."""
    comm = NcclComm()
    comm.direct_min_bytes = min_bytes
    return comm


class Flat(FlatComm):
    """All in one operand; both NCCL and the simulated group average."""

    has_average = True


def _sharded(library: Any, reshard: bool, change: Callable[[Any], None]) -> Callable[[Llama], nn.Module]:
    def wrap(model: Llama) -> nn.Module:
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kind = next(model.parameters()).device.type
        options = {"mesh": init_device_mesh(kind, (dist.get_world_size(),)), "mp_policy": policy}
        for block in model.blocks:
            library.fully_shard(block, reshard_after_forward=reshard, **options)
        library.fully_shard(model, **options)
        change(model)
        return model

    return wrap


def _torch(reshard: bool = True, change: Callable[[Any], None] = lambda model: None) -> Callable[[Llama], nn.Module]:
    import torch.distributed.fsdp as library

    return _sharded(library, reshard, change)


def _ours(reshard: bool = True, change: Callable[[Any], None] = lambda model: None) -> Callable[[Llama], nn.Module]:
    return _sharded(fsdp2, reshard, change)


def _prefetch_two(model: Any) -> None:
    """Explicit lists, the same for both libraries: the next unit, before this one computes."""
    blocks = list(model.blocks)
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


DEFAULT = NcclComm.direct_min_bytes
VARIANTS = {
    "floor": Variant(lambda model: model, narrow=True),
    "none": Variant(lambda model: model, autocasts=True),
    "torch": Variant(_torch()),
    "torch-false": Variant(_torch(False)),
    "torch-lists": Variant(_torch(change=_prefetch_two)),
    "fsdp2": Variant(_ours(), direct(DEFAULT)),
    "fsdp2-false": Variant(_ours(False), direct(DEFAULT)),
    "fsdp2-lists": Variant(_ours(change=_prefetch_two), direct(DEFAULT)),
    "fsdp2-auto": Variant(_ours(change=lambda model: model.set_auto_forward_prefetch()), direct(DEFAULT)),
    "fsdp2-flat": Variant(_ours(), Flat()),
    "fsdp2-1M": Variant(_ours(), direct(1 << 20)),
    "fsdp2-all": Variant(_ours(), direct(0)),
}


class Trainer:
    """A variant with its model and optimizer.

    Attributes:
        losses: of each step; on the device.
    """

    def __init__(self, variant: Variant, shape: Shape, device: torch.device, seed: int = 0):
        if variant.lanes is not None:
            fsdp2.comm.COMMS.update({BACKEND: variant.lanes, "nccl": variant.lanes})
        torch.manual_seed(seed)
        with device:
            model = Llama(shape)
        if variant.narrow:
            model.to(torch.bfloat16)
        self.model = variant.wrap(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.losses: list[torch.Tensor] = []
        self._autocasts = variant.autocasts
        tokens = torch.randint(shape.vocab, (4, shape.batch, shape.length + 1), device=device)
        self._data = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]

    def forward_backward(self) -> None:
        """On the next batch; nothing waits for the device."""
        tokens, targets = self._data[len(self.losses) % len(self._data)]
        with self._precision(tokens.device.type):
            loss = loss_of(self.model(tokens), targets)
        loss.backward()
        self.losses.append(loss.detach())

    def step(self) -> None:
        """Forward, backward, optimizer, gradients dropped."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _precision(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.bfloat16) if self._autocasts else nullcontext()
