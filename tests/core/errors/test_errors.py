"""What `fully_shard` refuses, and what it says (tests/behaviour.md, section X)."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

from fsdp2 import DataParallelMeshDims, OrderError, ShardPlacementResult, UnsupportedError, ZeroPolicy, fully_shard
from tests.helpers.models import check_step, error_of, is_sharded, linears, sharded_copy
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_a_child_after_its_parent(rank: int, world_size: int) -> None:
    """On one mesh torch said "Invariant encountered: value was None", on two it made a DTensor of two data axes."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = sharded_copy(plain, fully_shard)
    with torch.no_grad():
        model(torch.ones(1, 4))
    text = error_of(OrderError, lambda: fully_shard(model[0]))
    assert (
        "'weight' is sharded already, as '0.weight' of the FSDPSequential. Call fully_shard on a module before" in text
    )
    assert type(model[0]) is nn.Linear
    check_step(model, plain, rank, world_size)


class Chain(nn.ModuleList):
    """A container with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@on_ranks(2)
def test_containers(rank: int, world_size: int) -> None:
    """Behaviour 182: a ModuleList or ModuleDict has no forward; a subclass with one is fine."""
    modules = nn.ModuleList([nn.Linear(2, 2)])
    text = error_of(ValueError, lambda: fully_shard(modules))
    assert (
        "ModuleList has no forward, so its parameters would never be gathered; call fully_shard on its elements" in text
    )
    assert "ModuleDict" in error_of(ValueError, lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})))
    for params in (nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(2)})):
        assert "call fully_shard on the module that computes" in error_of(ValueError, partial(fully_shard, params))
    assert type(modules) is nn.ModuleList and not isinstance(modules[0].weight, DTensor)
    plain = Chain([nn.Linear(4, 4)])
    check_step(sharded_copy(plain, fully_shard), plain, rank, world_size)


@on_ranks(4)
@pytest.mark.parametrize("by_name", [True, False])
def test_mesh_in_another_order_than_its_groups(rank: int, world_size: int, by_name: bool) -> None:
    """It trained, and its checkpoint had the rows of one rank at the place of another's."""
    mesh = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("a", "b"))
    options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="a")} if by_name else {"mesh": mesh["a"]}
    ranks = [rank % 2, rank % 2 + 2]
    module = distribute_module(nn.Linear(2, 2), mesh) if by_name else nn.Linear(2, 2)
    text = error_of(UnsupportedError, lambda: fully_shard(module, **options))
    assert f"ascending ranks along a shard axis, as in its process group, {ranks}; on rank {rank}" in text
    assert f"the mesh has {ranks[::-1]}. Make the mesh with ascending ranks." in text
    if not by_name:
        odd = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("replicate", "shard"))
        error_of(UnsupportedError, lambda: fully_shard(nn.Linear(2, 2), mesh=odd))  # on all ranks
        replicas = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("replicate", "shard"))
        fully_shard(nn.Linear(2, 2), mesh=replicas)  # the order of replicas does not matter, unless they share shards
        policy = ZeroPolicy(3, shard_replicas=True)
        error_of(UnsupportedError, lambda: fully_shard(nn.Linear(2, 2), mesh=replicas, zero=policy))


@on_ranks(4)
def test_one_group_under_two_meshes(rank: int, world_size: int) -> None:
    """Behaviour 187: two different meshes over the same ranks are refused, or equal ones taken for one."""
    plain = linears(2)
    meshes = [init_device_mesh("cpu", (world_size,)) for _ in range(2)]
    model = sharded_copy(
        plain,
        lambda m: fully_shard(
            m, shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), meshes[param.ndim % 2])
        ),
    )
    check_step(model, plain, rank, world_size)
    assert is_sharded(model)


@on_ranks(2)
def test_sparse_gradients(rank: int, world_size: int) -> None:
    """An embedding with sparse gradients; the error was "unsupported memory format option Contiguous"."""
    model = fully_shard(nn.Embedding(8, 4, sparse=True))
    message = error_of(UnsupportedError, lambda: model(torch.tensor([1, 2])).sum().backward())
    assert "'weight': expected a dense gradient" in message and "sparse=False" in message
