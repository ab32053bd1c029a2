"""HSDP: sharding over one axis of a 2-D mesh, replication over the other (Behaviour 106-111)."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import Dot, add, grads
from tests.helpers.parity_models import (
    Layers,
    assert_gradients,
    batch,
    count,
    expect,
    local,
    mean_gradients,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 4)).square().sum().backward()


@on_ranks(4)
def test_axes(rank: int, world_size: int) -> None:
    """Behaviour 20, 106: dim 0 replicates, dim 1 shards; gathers go over the shards, all-reduces over the replicas."""
    model: Any = fully_shard(nn.Linear(4, 6), mesh=mesh_2d(2, 2))
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.to_local().shape == (3, 4)
    with events.record() as log:
        backward(model, 0, rank)
    assert [(e.kind, e.numel, e.group_size) for e in log if e.group_size] == [
        ("all_gather", 30, 2),
        ("reduce_scatter", 15, 2),
        ("all_reduce", 15, 2),
    ]


@on_ranks(4)
def test_all_reduce_follows_its_reduce_scatter(rank: int, world_size: int) -> None:
    """Behaviour 106, 112: one all-reduce a group, after the group's reduce-scatter, without waiting for the end."""
    model = shard_blocks(fsdp2, Layers(2), mesh=mesh_2d(2, 2))
    with events.record() as log:
        backward(model, 0, rank)
    text = "".join(f"{e.kind} {e.unit or '(root)'}\n" for e in log if e.kind in ("reduce_scatter", "all_reduce"))
    expect(
        rank,
        text,
        """\
reduce_scatter layers.1
all_reduce layers.1
reduce_scatter layers.0
all_reduce layers.0
reduce_scatter (root)
all_reduce (root)
""",
    )


@on_ranks(4)
def test_without_all_reduce(rank: int, world_size: int) -> None:
    """Behaviour 107: partial shards add up unseen, `.grad` stays None; the next all-reduce takes the sum."""
    plain = Layers(2)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(2, 2))
    for _ in range(2):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            with events.record() as log:
                backward(model, micro, rank)
            expected = {"reduce_scatter": 3, "all_reduce": 3 if micro == 2 else 0}
            assert count(log, "reduce_scatter", "all_reduce") == expected
            assert all((param.grad is None) == (micro < 2) for param in model.parameters())

        def three(m: nn.Module, r: int) -> None:
            for micro in range(3):
                backward(m, micro, r)

        assert_gradients(model, mean_gradients(plain, world_size, three))
        model.zero_grad()


@on_ranks(4)
def test_without_sync(rank: int, world_size: int) -> None:
    """Behaviour 108: without sync neither collective runs, whatever `set_requires_all_reduce` says; then both, once."""
    plain = Layers(2)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(2, 2))
    model.set_requires_gradient_sync(False)
    with events.record() as log:
        backward(model, 0, rank)
        model.set_requires_all_reduce(False)
        backward(model, 1, rank)
    assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 0, "all_reduce": 0}
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    with events.record() as log:
        backward(model, 2, rank)
    assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 3, "all_reduce": 3}

    def three(m: nn.Module, r: int) -> None:
        for micro in range(3):
            backward(m, micro, r)

    assert_gradients(model, mean_gradients(plain, world_size, three))


@on_ranks(4)
def test_all_three_homes_of_a_gradient(rank: int, world_size: int) -> None:
    """Behaviour 95, 103, 107: unsynced, partial and sharded gradients are kept apart and add up; zero_grad takes
    one."""
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2))
    add(model, 100)
    add(model, 20, all_reduce=False)
    add(model, 3, sync=False)
    assert grads(model) == [100]
    with pytest.warns(UserWarning, match="were not reduced"):
        model.zero_grad()
    assert grads(model) == [None]
    add(model, 4, all_reduce=False)  # the partial is now 20 + 3 + 4
    assert grads(model) == [None]
    add(model, 1000)
    assert grads(model) == [1027]
    add(model, 1)
    assert grads(model) == [1028]


@on_ranks(2, 4)
def test_replicas_of_one_rank_shards(rank: int, world_size: int) -> None:
    """Behaviour 109: mesh (W, 1) is data parallelism by all-reduce alone."""
    plain = Layers(2)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(world_size, 1))
    assert model.layers[0].weight.to_local().shape == (4, 4)
    for step in range(2):
        model.zero_grad()
        with events.record() as log:
            backward(model, step, rank)
        assert count(log, "all_gather", "reduce_scatter", "all_reduce") == {
            "all_gather": 0,
            "reduce_scatter": 0,
            "all_reduce": 3,
        }
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r, step=step: backward(m, step, r)))


@on_ranks(2, 4)
def test_one_replica(rank: int, world_size: int) -> None:
    """Behaviour 109: mesh (1, W) gathers and reduces as FSDP does."""
    plain = Layers(2)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(1, world_size), reshard_after_forward=True)
    assert model.layers[0].weight.placements == (Replicate(), Shard(0))
    for step in range(2):
        model.zero_grad()
        with events.record() as log:
            backward(model, step, rank)
        assert count(log, "all_gather", "reduce_scatter") == {"all_gather": 6, "reduce_scatter": 3}
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r, step=step: backward(m, step, r)))


@on_ranks(4)
def test_replicas_are_not_synchronised(rank: int, world_size: int) -> None:
    """Behaviour 110: initial values are the user's affair, who broadcasts local shards over the replicate axis."""
    mesh = mesh_2d(2, 2)
    torch.manual_seed(mesh.get_local_rank("replicate"))
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)

    def replicas_agree() -> bool:
        shards: list[Any] = [None] * world_size
        dist.all_gather_object(shards, local(model.weight.detach()))
        return torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])

    assert not replicas_agree()
    group = mesh.get_group("replicate")
    for param in model.parameters():
        dist.broadcast(local(param.detach()), dist.get_global_rank(group, 0), group=group)
    assert replicas_agree()
    backward(model, 0, rank)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert replicas_agree()


@on_ranks(4)
def test_members_of_a_group_at_different_times(rank: int, world_size: int) -> None:
    """Behaviour 111: parameters first used, or last used, in different microbatches share one partial sum."""
    model: Any = fully_shard(Dot(4), mesh=mesh_2d(2, 2))
    add(model, 1, None, None, None, all_reduce=False)
    add(model, 2, 30, None, None, all_reduce=False)
    with events.record() as log:
        add(model, None, 4, 500, None)
    assert grads(model) == [3, 34, 500, None]
    assert count(log, "all_reduce") == {"all_reduce": 1}
    add(model, 1, None, None, 7)
    assert grads(model) == [4, 34, 500, 7]


@on_ranks(4)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_partials_are_in_the_reduce_dtype(rank: int, world_size: int, reduce_dtype: torch.dtype) -> None:
    """Behaviour 107, 111: 256 and 1 are 257 in fp32 and 256 in bf16; the all-reduce has that dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2), mp_policy=policy)
    add(model, 256, all_reduce=False)
    with events.record() as log:
        add(model, 1)
    assert grads(model) == [257 if reduce_dtype is torch.float32 else 256]
    assert model.weights[0].grad.dtype == torch.float32
    assert [e.dtype for e in log if e.kind == "all_reduce"] == [reduce_dtype]


@on_ranks(4)
@pytest.mark.parametrize(
    ("factors", "force", "expected"),
    [
        ([8, 16, 4], [False, False, False], 6 * 4 / 8 + 2 * 4 / 16 + 3 * 4 / 4),
        ([8, 16], [False, False], 6 * 4 / 8 + 2 * 4 / 16),
        ([16, 8], [True, False], 6 * 4 / 16 + 2 * 4 / 8),
        ([None, 16], [False, True], 6 * 4 / 4 + 2 * 4 / 16),
        ([2, 8], [False, False], 6 * 4 / 2 + 2 * 4 / 8),
        ([None, None], [False, True], 6 + 2),
    ],
)
def test_divide_factor_of_each_microbatch(
    rank: int, world_size: int, factors: list[float | None], force: list[bool], expected: float
) -> None:
    """A user divided each microbatch by its number of tokens, and all-reduced in the last one only. All gradients were
    divided by the last factor, silently: 8 and 16 for 6 and 2 gave 2.0. The factor that held when a gradient was
    reduce-scattered counts for it. (torch's FSDP2 multiplies before it sums, which gloo cannot; so it is not compared.)
    """
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2))
    for index, (value, factor, sums) in enumerate(zip((6, 2, 3), factors, force, strict=False)):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(sums)
        model.set_requires_all_reduce(index == len(factors) - 1)
        model(value).backward()
    assert grads(model) == [expected]


SETTERS = {
    "sync": lambda model, value: model.set_requires_gradient_sync(value),
    "all_reduce": lambda model, value: model.set_requires_all_reduce(value),
}


@on_ranks(4)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_order_of_the_setters(rank: int, world_size: int, length: int) -> None:
    """transformers' Trainer turned all-reduce off before each microbatch and gradient sync on after it. Here the second
    call left the first in force, so gradients stayed partial for ever: nothing was trained, without an error. On torch
    `set_requires_gradient_sync` sets both. Every sequence of the two setters does here what it does there."""
    calls = [(name, value) for name in SETTERS for value in (False, True)]
    sequences = list(product(calls, repeat=length))
    for sequence in sequences[:: 1 if length < 3 else 5]:
        found = []
        for api in (fsdp2, torch.distributed.fsdp):
            model: Any = api.fully_shard(Dot(), mesh=mesh_2d(2, 2))
            for name, value in sequence:
                SETTERS[name](model, value)
            model(3).backward()
            model.set_requires_gradient_sync(True)
            model(4).backward()
            found.append(grads(model))
            for name, value in sequence:
                SETTERS[name](model, value)
                model(5).backward()
            found.append(grads(model))
        assert found[:2] == found[2:], sequence
