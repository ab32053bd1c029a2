"""How much is communicated: the number and the size of collectives per step (Behaviour 22, 23, 74, 97, 132, 133)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.parity_models import Layers, batch, count, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def counts(log: list[events.Event]) -> tuple[int, ...]:
    """All-gathers, reduce-scatters, all-reduces."""
    return tuple(count(log, *KINDS).values())


@on_ranks(2, 4)
@pytest.mark.parametrize("root_weight", [True, False], ids=["root_has_parameters", "empty_root"])
@pytest.mark.parametrize("raf", [True, None, False, 2])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_one_step(rank: int, world_size: int, raf: bool | int | None, root_weight: bool, hsdp: bool) -> None:
    """Behaviour 74, 107, 132: N groups: N gathers forward; N, N-1 or 0 backward; N reduce-scatters, N all-reduces."""
    if hsdp and world_size == 2:
        return
    mesh = mesh_2d(2, 2) if hsdp else None
    model = shard_blocks(fsdp2, Layers(3, root_weight=root_weight), mesh=mesh, reshard_after_forward=raf)
    num_groups = 4 if root_weight else 3
    in_backward = {True: num_groups, 2: num_groups, None: 3, False: 0}[raf]
    for _ in range(2):
        with events.record() as forward:
            loss = model(batch(0, rank, 4)).sum()
        with events.record() as backward:
            loss.backward()
        assert counts(forward) == (num_groups, 0, 0)
        assert counts(backward) == (in_backward, num_groups, num_groups if hsdp else 0)


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("raf", "keep", "gathers"), [(True, False, 24), (None, False, 21), (False, False, 12), (False, True, 4)]
)
def test_accumulation(rank: int, world_size: int, raf: bool | None, keep: bool, gathers: int) -> None:
    """Behaviour 97: three microbatches, N = 4: N reductions; 2NM, NM or N gathers, kept until the last."""
    model = shard_blocks(fsdp2, Layers(3), reshard_after_forward=raf)
    for _ in range(2):
        with events.record() as log:
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                if keep:
                    model.set_reshard_after_backward(micro == 2)
                model(batch(micro, rank, 4)).sum().backward()
        assert counts(log) == (gathers, 4, 0)


def collectives(log: list[events.Event]) -> list[tuple[Any, ...]]:
    return [(e.kind, e.numel, e.nbytes, e.dtype, e.group_size) for e in log if e.kind in KINDS]


@on_ranks(4)
def test_sizes_of_a_smaller_group(rank: int, world_size: int) -> None:
    """Behaviour 74: with an int the backward all-gather is over that many ranks and has the same output."""
    model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=2)
    with events.record() as log:
        model(batch(0, rank, 4)).sum().backward()
    assert [(e.kind, e.numel, e.group_size) for e in log if e.kind in KINDS] == [
        ("all_gather", 16, 4),
        ("all_gather", 16, 2),
        ("reduce_scatter", 4, 4),
    ]


@on_ranks(2)
def test_one_rank(rank: int, world_size: int) -> None:
    """Behaviour 133: over one rank nothing is communicated; parameters are DTensors all the same, copied to be
    unsharded."""
    alone = mesh_2d(2, 1)["shard"]
    model: Any = shard_blocks(fsdp2, Layers(2), mesh=alone, reshard_after_forward=True)
    shards = [param.to_local().data_ptr() for param in model.parameters()]
    for step in range(2):
        with events.record() as log:
            loss = model(batch(step, rank, 4)).sum()
            loss.backward()
        assert counts(log) == (0, 0, 0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.grad is not None
    for module in (model, *model.layers):
        module.unshard()
    assert not set(shards) & {param.data_ptr() for param in model.parameters()}
