"""Kinds of activation checkpointing and offloading on sharded blocks; the fuzzer draws `checkpoint` itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.helpers.parity_models import Race, Stack, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks

Run = Callable[[nn.Module, Tensor], Tensor]
# `weight.t()`: what is cached then shares the parameters' storage, which is given back and filled again.
VIEWS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default]


def selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, VIEWS)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def on_cpu(block: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return block(x)


def packed(block: nn.Module, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        return block(x)


def packed_as_it_is(block: nn.Module, x: Tensor) -> Tensor:
    """Keeps the very tensor: after the reshard its storage is empty, and in backward it must be there again."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return block(x)


RUNS: dict[str, Run] = {
    "selective": selective,
    "save_on_cpu": on_cpu,
    "saved_tensors_hooks": packed,
    "saved_tensors_hooks_identity": packed_as_it_is,
}


class Kinds(Stack):
    """A `Stack` that runs each block through `run`, after dropout: a recompute must draw the same mask."""

    def __init__(self, run: Run, dropout: float = 0.5) -> None:
        super().__init__()
        self.run = run
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.run(nn.Sequential(self.dropout, block), x)
        return self.out(x)


def seeded(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    return one_batch(model, step, rank)


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("kind", RUNS)
def test_functions(rank: int, world_size: int, kind: str, raf: bool) -> None:
    """Behaviour 175: each function that saves less, or elsewhere, trains as torch's FSDP2 and one process do."""
    shard = partial(shard_blocks, reshard_after_forward=raf)
    Race(rank, world_size, lambda: Kinds(RUNS[kind]), shard, backward=seeded, exact=True).run(2)


def wrapped(kind: str) -> Stack:
    """A `Stack` whose blocks are wrapped, or hooked, before they are sharded."""
    model: Any = Stack()
    for i, block in enumerate(model.blocks):
        if kind == "reentrant_wrapper":
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
        elif kind == "offload_wrapper":
            model.blocks[i] = offload_wrapper(block)
        elif kind == "composable":
            composable_checkpoint(block)
    return model


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("kind", ["reentrant_wrapper", "offload_wrapper", "composable"])
def test_wrappers(rank: int, world_size: int, kind: str, raf: bool) -> None:
    """Behaviour 175: each wrapper, and the composable form, trains as torch's FSDP2 and one process do, bit by bit."""
    shard = partial(shard_blocks, reshard_after_forward=raf)
    Race(rank, world_size, lambda: wrapped(kind), shard, exact=True).run(2)
