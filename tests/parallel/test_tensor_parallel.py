"""Tensor parallelism first, then `fully_shard` on the other axes of the mesh (Behaviour 158-162): what parameters are
outside and inside of forward, what is sent, other shard dims. Further tests are in `test_tensor_parallel_*.py`."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing import assert_close

import fsdp2
from tests.helpers.models import error_of
from tests.helpers.parity_models import full, local, mean_gradients, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    DIM,
    assert_tp_gradients,
    data_rank,
    dp_tp,
    hsdp_tp,
    mesh_of,
    placements_after,
    quiet,
    tp_pair,
    tp_race,
)


@on_ranks(4)
@pytest.mark.parametrize("size", [17, 8, 3, 5])
def test_sharded_parameters(rank: int, world_size: int, size: int) -> None:
    """Behaviour 24, 25, 158, 160: placements and local shapes over ("dp", "tp"); `full_tensor` restores also what
    divides by nothing. Unsharded they are on the TP mesh alone, as TP left them; plain ones plain; each for life."""
    mesh = dp_tp()
    model: Any = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.LayerNorm(size))
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = {name: form_of(param) for name, param in model.named_parameters()}
    values = {name: local(param.detach()).clone() for name, param in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    expected: dict[str, tuple[Placement, ...]] = {
        "0.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "0.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "1.weight": (Shard(0), Shard(1)),
        "1.bias": (Shard(0), Replicate()),
        "2.weight": (Shard(0),),
        "2.bias": (Shard(0),),
    }
    for name, param in model.named_parameters():
        value = plain.get_parameter(name)
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor) and param.is_leaf, name
        assert param.placements == expected[name], name
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")[: len(expected[name])], name
        assert (param.shape, param.stride()) == before[name][:2], name
        assert torch.equal(param.to_local(), shard_like(value, param)), name
        assert param.to_local().is_contiguous(), name
        assert torch.equal(param.full_tensor(), value), name
    in_shards = dict(model.named_parameters())
    objects = []
    for trains in (True, False):
        in_shards["0.weight"].requires_grad_(trains)
        model.unshard()
        objects.append([*model.parameters()])
        for name, param in model.named_parameters():
            assert isinstance(param, nn.Parameter) and param.is_leaf, name
            assert param.requires_grad is (trains or name != "0.weight"), name
            assert form_of(param) == before[name], name
            assert torch.equal(local(param.detach()), values[name]), name
        model.reshard()
        assert all(param is in_shards[name] for name, param in model.named_parameters())
    assert all(first is second for first, second in zip(*objects, strict=True))


def form_of(param: Any) -> tuple[Any, ...]:
    mesh = (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()
    return (param.shape, param.stride(), *mesh)


def other_dim(param: nn.Parameter) -> Shard | None:
    """The dim of a matrix that TP does not use; the default for everything else."""
    if not isinstance(param, DTensor) or param.ndim != 2 or not isinstance(param.placements[0], Shard):
        return None
    return Shard(1 - param.placements[0].dim)


@on_ranks(4)
def test_shard_dim_that_tp_does_not_use(rank: int, world_size: int) -> None:
    """Behaviour 162: `Shard` over both axes, no `_StridedShard`, for weights in colwise and in rowwise style."""
    mesh = dp_tp()
    model = tp_race(mesh, shard_placement_fn=other_dim, exact=True).run(3)
    assert model.get_parameter("blocks.0.up.weight").placements == (Shard(1), Shard(0))
    assert model.get_parameter("blocks.0.down.weight").placements == (Shard(0), Shard(1))
    assert model.get_parameter("blocks.0.up.bias").placements == placements_after(".up.bias")


@on_ranks(4)
@pytest.mark.parametrize("dim", [1, -1])
def test_shard_dim_that_tp_uses(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 27, 162: dim 1 of a rowwise weight is cut by TP first, then by fully_shard; negative dims count too."""
    mesh = dp_tp()
    model: Any = nn.Linear(8, 4)
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
    fsdp2.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)
    assert model.weight.placements == (_StridedShard(1, split_factor=2), Shard(1))
    assert torch.equal(model.weight.to_local(), shard_like(plain.weight, model.weight))
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    x = torch.ones(2, 8) + data_rank(mesh)
    with quiet():
        model(x).square().sum().backward()
    expected = mean_gradients(plain, 2, lambda m, r: m(torch.ones(2, 8) + r).square().sum().backward())
    assert_tp_gradients(model, expected)


@on_ranks(4)
def test_reshard_to_a_smaller_group(rank: int, world_size: int) -> None:
    """Behaviour 75: an int for `reshard_after_forward` trains as one process does."""
    tp_race(dp_tp(4, 1), reshard_after_forward=2, torch=False).run(3)


@on_ranks(4)
def test_tp_mesh_of_another_device_type(rank: int, world_size: int) -> None:
    """Behaviour 161: a parameter on a mesh of another device type is refused, naming both types."""
    other = mesh_of((2, 2), ("dp", "tp"), "meta")["tp"]
    local_part = torch.empty(4, DIM, device="meta")
    model: Any = nn.Linear(DIM, DIM, bias=False)
    weight: Any = DTensor.from_local(local_part, other, [Shard(0)], run_check=False)
    weight._is_param = True  # as nn.Parameter does, but for the detach, which torch 2.15 cannot do on such a mesh
    model.weight = weight.requires_grad_()
    error = error_of(ValueError, lambda: fsdp2.fully_shard(model, mesh=dp_tp()["dp"]))
    assert "meta" in error and "cpu" in error and "weight" in error


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


@pytest.mark.exhaustive
@on_ranks(8)
def test_hsdp_on_eight_ranks(rank: int, world_size: int) -> None:
    """Behaviour 159: all three axes at work."""
    tp_race(hsdp_tp(2, 2), plan="sequence", exact=True).run(2)
