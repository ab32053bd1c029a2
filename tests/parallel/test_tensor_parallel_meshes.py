"""Tensor parallelism on meshes of three axes: replicas, shards and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

import fsdp2
from tests.helpers.parity_models import full, local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    TpLm,
    dp_tp,
    hsdp_tp,
    mesh_of,
    tp_pair,
    tp_race,
)


@pytest.mark.exhaustive
@on_ranks(8)
def test_hsdp_on_eight_ranks(rank: int, world_size: int) -> None:
    """Behaviour 159: all three axes at work."""
    tp_race(hsdp_tp(2, 2), lambda: TpLm(depth=1), plan="sequence", exact=True).run(2)


@on_ranks(4)
def test_two_meshes_of_one_process(rank: int, world_size: int) -> None:
    """Behaviour 158: DTensor takes a parameter's mesh from a cache, in which equal meshes are one. So the TP mesh of a
    model may be another object than its user passed, and part of another mesh that the process has made over its
    ranks."""
    for mesh in (dp_tp(), hsdp_tp(1, 2), dp_tp(), hsdp_tp(2, 1)):
        plain, model = tp_pair(mesh)
        for name, param in model.named_parameters():
            assert torch.equal(local(param.detach()), shard_like(plain.get_parameter(name), param)), name
            assert torch.equal(full(param), plain.get_parameter(name)), name
        model.unshard()
        model.reshard()


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_two_model_axes(rank: int, world_size: int, sizes: tuple[int, int, int]) -> None:
    """Behaviour 159: EP and TP, two axes of model parallelism, beside one for the data."""
    mesh = mesh_of(sizes, ("dp", "ep", "tp"))
    whole = torch.arange(48.0).view(8, 6)
    model: Any = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["ep", "tp"], [Shard(0), Shard(1)]))
    model.forward = lambda: model.weight.redistribute(placements=[Replicate()] * 2).to_local().square().sum()
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    first = _StridedShard(0, split_factor=2) if sizes[1] == 2 else Shard(0)
    assert model.weight.placements == (first, Shard(0), Shard(1))
    assert model.weight.device_mesh == mesh
    assert torch.equal(model.weight.full_tensor(), whole)
    model.unshard()
    assert (model.weight.device_mesh, model.weight.placements) == (mesh["ep", "tp"], (Shard(0), Shard(1)))
    model.reshard()
    model().backward()
    assert model.weight.grad.placements == model.weight.placements
    assert_close(model.weight.grad.full_tensor(), 2 * whole)
