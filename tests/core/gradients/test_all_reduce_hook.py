"""The hook of the user between reduce-scatter and all-reduce."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.testing import assert_close

from tests.helpers.either_api import api, sharded, train
from tests.helpers.models import linears
from tests.helpers.parity_models import (
    Layers,
    batch,
    full,
    mesh_2d,
)
from tests.helpers.ranks import on_ranks


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_all_reduce_hook(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 137: once per group, on the flat result in the reduce dtype, while no gradient is there yet; in-place
    edits count. With HSDP after the all-reduce: every replica sees the mean over all ranks."""
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    policy = api.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model: Any = api.fully_shard(nn.Linear(4, 4, dtype=torch.float64), mesh=mesh, mp_policy=policy)
    seen: list[Tensor] = []

    def hook(flat: Tensor) -> None:
        assert model.weight.grad is None
        seen.append(flat.clone())
        flat.mul_(3)

    model.set_all_reduce_hook(hook)
    model(batch(0, rank, 4).double()).sum().backward()
    (flat,) = seen
    num_shards = world_size // 2 if hsdp else world_size
    assert flat.shape == ((16 + 4) // num_shards,) and flat.dtype == torch.float32
    mean = torch.stack([batch(0, each, 4).sum(0) for each in range(world_size)]).mean(0)
    assert_close(flat[: 16 // num_shards].view(-1, 4), mean.expand(4 // num_shards, 4))
    assert model.weight.grad.dtype == torch.float64
    assert_close(full(model.weight.grad), 3 * mean.expand(4, 4), check_dtype=False)
    assert_close(full(model.bias.grad), torch.full((4,), 9.0), check_dtype=False)


@on_ranks(2)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_all_reduce_hook_is_called_once_per_reduction(rank: int, world_size: int, num_layers: int) -> None:
    """Behaviour 137, 95: with the groups that reduce, in their order, and not without gradient sync."""
    model = sharded(Layers(num_layers))
    order: list[str] = []
    for index, layer in enumerate(model.layers):
        layer.set_all_reduce_hook(lambda flat, index=index: order.append(f"{index}"))
    for sync in (False, True, True):
        model.set_requires_gradient_sync(sync)
        model(batch(0, rank, 4)).sum().backward()
    assert order == [f"{index}" for index in reversed(range(num_layers))] * 2


@on_ranks(2)
def test_hook_and_factor_are_taken_back(rank: int, world_size: int) -> None:
    """By None, as with torch: it failed, the hook in backward."""
    model: Any = api.fully_shard(nn.Linear(4, 4))
    model.set_all_reduce_hook(lambda flat: flat.zero_())
    model.set_all_reduce_hook(None)
    model.set_gradient_divide_factor(7.0)
    model.set_gradient_divide_factor(None)
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert_close(full(model.weight.grad), torch.full((4, 4), 1.5))


@on_ranks(2, 4)
def test_stream_of_the_all_reduce_hook(rank: int, world_size: int) -> None:
    """Behaviour 137: a stream of its own on a 1-D mesh; with HSDP the hook belongs to the all-reduce's stream."""
    stream = torch.cpu.Stream()
    plain = linears(1)
    model: Any = api.fully_shard(copy.deepcopy(plain))
    seen: list[int] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()), stream=stream)
    train(model, plain, rank, world_size, 4)
    assert seen == [20 // world_size] * 2
    model = api.fully_shard(linears(1), mesh=mesh_2d(2, world_size // 2))
    with pytest.raises(ValueError, match="stream"):
        model.set_all_reduce_hook(lambda flat: None, stream=stream)


class InOut(nn.Module):
    """Two bias-free layers, 10-40-10; the weights of each are one number."""

    def __init__(self, in_value: float, out_value: float) -> None:
        super().__init__()
        self.in_proj = nn.Linear(10, 40, bias=False)
        self.out_proj = nn.Linear(40, 10, bias=False)
        nn.init.constant_(self.in_proj.weight, in_value)
        nn.init.constant_(self.out_proj.weight, out_value)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.in_proj(x))


@on_ranks(4)
def test_replicas_by_an_all_reduce_hook(rank: int, world_size: int) -> None:
    """Behaviour 138: two replicas, kept apart from `fully_shard` and averaged by the hook; weights 0 and 0 on the one,
    1 and 2 on the other: hidden values 0 and 45, whose mean 22.5 is out_proj's gradient on both."""
    mesh = mesh_2d(2, 2)
    replica, group = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    model: Any = InOut(1, 2) if replica else InOut(0, 0)
    for module in (model.in_proj, model.out_proj, model):
        api.fully_shard(module, mesh=mesh["shard"])

    def average(flat: Tensor) -> None:
        dist.all_reduce(flat.div_(2), group=group)

    for module in (model.in_proj, model.out_proj):
        module.set_all_reduce_hook(average)
    model(torch.arange(10.0)).sum().backward()
    assert_close(full(model.out_proj.weight.grad), torch.full((10, 40), 22.5))
    assert_close(full(model.in_proj.weight.grad), (10 * torch.arange(10.0)).expand(40, 10))
