"""Replicas that start from different parameters: an error at the first forward, on all ranks, with names."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import ArgumentError, ZeroPolicy, checkpoint, fully_shard
from tests.helpers.parity_models import Layers, Stack, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks


@on_ranks(4)
@pytest.mark.parametrize("where", ["everywhere", "one_shard"])
def test_a_seed_for_each_rank(rank: int, world_size: int, where: str) -> None:
    """A program without torch.manual_seed: its replicas trained as many models, each with a falling loss. Also where
    the difference is in one shard: ranks that hold equal shards get the error too, and nobody hangs."""
    torch.manual_seed(rank if where == "everywhere" else 0)
    model: Any = shard_blocks(fsdp2, Layers(2), mesh=mesh_2d(2, 2))
    if where == "one_shard" and rank == 3:
        local(model.layers[1].weight.detach())[0, 0] += 1
    with pytest.raises(ArgumentError, match="replicas start from different parameters") as caught:
        model(batch(0, rank, 4))
    text = str(caught.value)
    if where == "one_shard":
        assert "'layers.1.weight' of rank 1 differs on rank 3." in text, text
        assert text.count("another on") == 1
    else:
        assert "'layers.0.weight' of rank 0 differs on rank 2; 'layers.1.weight' of rank 0" in text, text
        assert "'layers.0.weight' of rank 1 differs on rank 3" in text, text
    for param in model.parameters():
        group = mesh_2d(2, 2).get_group("replicate")
        dist.broadcast(local(param.detach()), rank % 2, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its shards are of two seeds
        model(batch(0, rank, 4)).sum().backward()  # the same model, once its replicas are equal


@on_ranks(2, 4)
@pytest.mark.parametrize("zero", [0, 1])
def test_without_a_shard_axis(rank: int, world_size: int, zero: int) -> None:
    """ZeRO stage 0 holds everything on each rank; stage 1 cuts it, so there are no replicas to compare, but all ranks
    that sharded another model than the first one say so."""
    torch.manual_seed(rank)
    model = shard_blocks(fsdp2, Layers(2), zero=ZeroPolicy(stage=zero))
    if zero == 0:
        with pytest.raises(
            ArgumentError, match=rf"'layers.0.weight' of rank 0 differs on rank{'s 1, 2, 3' * (world_size > 2)}"
        ):
            model(batch(0, rank, 4))
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(0, rank, 4))
        texts: list[Any] = [None] * world_size
        dist.all_gather_object(texts, [str(each.message) for each in caught])
        expected = r"has sharded another model than rank [0-9] \(other values of 'layers.0.weight'\)"
        assert len(re.findall(expected, str(texts))) == world_size - 1


@on_ranks(2)
def test_values_that_have_changed_places(rank: int, world_size: int) -> None:
    """Neighbours, so that the bytes have the same sum."""
    model = shard_blocks(fsdp2, Layers(2), zero=ZeroPolicy(stage=0))
    if rank == 1:
        weight = local(model.layers[1].weight.detach())
        weight.copy_(weight.flip(1))
    with pytest.raises(ArgumentError, match=r"'layers.1.weight' of rank 0 differs on rank 1\."):
        model(batch(0, rank, 4))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.temperature


@on_ranks(2)
def test_a_scalar_beside_shards(rank: int, world_size: int) -> None:
    """Scalars are replicated, also under FSDP: a model that is another on each rank is often found by these."""
    torch.manual_seed(rank)
    model = fully_shard(Scaled())
    with pytest.raises(ArgumentError, match="'temperature' of rank 0 differs on rank 1"):
        model(batch(0, rank, 4))


@on_ranks(4)
@pytest.mark.parametrize("flow", ["materialize", "load", "to_empty"])
def test_values_that_come_after_sharding(rank: int, world_size: int, flow: str, tmp_path: Path) -> None:
    """From the meta device, or from different seeds and then a checkpoint: what counts is the first forward."""
    torch.manual_seed(0)
    plain = Stack(depth=1)
    if flow == "load":
        source = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(2, 2))
        checkpoint.save(tmp_path / "saved", model=source)
        torch.manual_seed(rank)
        model: Any = shard_blocks(fsdp2, Stack(depth=1), mesh=mesh_2d(2, 2))
        checkpoint.load(tmp_path / "saved", model=model)
    else:
        with torch.device("meta"):
            model = Stack(depth=1)
        shard_blocks(fsdp2, model, mesh=mesh_2d(2, 2))
        if flow == "materialize":
            fsdp2.init.materialize(model, seed=0)
        else:
            model.to_empty(device="cpu")
            for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                with torch.no_grad():
                    param.copy_(torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements))
            for buffer, value in zip(model.buffers(), plain.buffers(), strict=True):
                buffer.copy_(value)
    model(batch(0, rank)).sum().backward()


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
def test_every_bit_counts(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Any dtype, shards of a few bytes, frozen parameters: one element that differs is found, and NaN equals NaN."""
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 5)
    trainable = dtype.is_floating_point or dtype.is_complex
    values = torch.full((7,), float("nan")) if dtype.is_floating_point else torch.arange(7)
    model.more = nn.Parameter(values.to(dtype), requires_grad=trainable)
    fully_shard(model, mesh=mesh_2d(2, 2))
    twin = copy.deepcopy(model)
    model(batch(0, rank, 3))
    if rank == 0:
        local(twin.more.detach())[3] = 100
    with pytest.raises(ArgumentError, match="'more' of rank 0 differs on rank 2"):
        twin(batch(0, rank, 3))


@on_ranks(4)
def test_once(rank: int, world_size: int) -> None:
    """Only the first forward looks: what a user does to replicas later is the user's affair."""
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh_2d(2, 2))
    with torch.no_grad():
        model(batch(0, rank, 4))
        model.reshard()
        local(model.weight.detach()).add_(rank)
        model(batch(0, rank, 4))
