"""The forms of a parameter: DTensor on this rank's rows, plain tensor, and their gradients
(tests/behaviour.md, section C)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import ShardPlacementResult, events, fully_shard
from tests.helpers.models import (
    MLP_SHAPES,
    check_step,
    is_sharded,
    linears,
    mlp,
    numels,
    reference_grads,
    run_step,
    sharded_copy,
    units,
)
from tests.helpers.parity_models import assert_gradients, batch, full, local, mean_gradients, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks

SHAPES = [(3, 3), (1, 4), (5, 2), (8, 3), (4, 2, 3), (3,), (1,), (2, 1)]


class Bag(nn.Module):
    """Parameters of given shapes, all of which enter the output."""

    def __init__(self, *shapes: tuple[int, ...], requires_grad: bool = True) -> None:
        super().__init__()
        self.values = nn.ParameterList(
            nn.Parameter(torch.randn(shape), requires_grad=requires_grad) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * sum(value.square().sum() for value in self.values)


def rows(whole: Tensor, rank: int, world_size: int, dim: int = 0) -> Tensor:
    """What torch.chunk gives to this rank; no rows past the last chunk."""
    chunks = whole.detach().chunk(world_size, dim)
    return chunks[rank] if rank < len(chunks) else whole.detach().narrow(dim, 0, 0)


@on_ranks(2, 4)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_sharded_parameter(rank: int, world_size: int, requires_grad: bool) -> None:
    """Behaviour 20: a leaf DTensor that is an nn.Parameter, with the global size and stride, on the mesh."""
    plain = Bag(*SHAPES, requires_grad=requires_grad)
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded_copy(plain, lambda m: fully_shard(m, mesh=mesh))
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.is_leaf and param.requires_grad == requires_grad and param.grad is None
        assert (param.shape, param.stride(), param.dtype) == (old.shape, old.stride(), old.dtype)
        assert param.device_mesh == mesh and param.placements == (Shard(0),)


@on_ranks(2, 3, 4)
def test_local_shards_are_chunks(rank: int, world_size: int) -> None:
    """Behaviour 21: this rank's chunk, no rows past the last one, all contiguous; put together, the original."""
    plain = Bag(*SHAPES)
    model = sharded_copy(plain, fully_shard)
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.to_local(), rows(old, rank, world_size))
        assert param.to_local().is_contiguous()
        assert torch.equal(full(param), old)
    if world_size == 4:
        assert model.values[0].to_local().shape[0] == (1 if rank < 3 else 0)
    check_step(model, plain, rank, world_size)


@on_ranks(2, 4)
def test_local_storage_is_padded(rank: int, world_size: int) -> None:
    """Behaviour 22: to ceil(dim0 / S) rows on every rank."""
    model = fully_shard(Bag(*SHAPES))
    for param in model.parameters():
        padded_rows = -(-param.shape[0] // world_size)
        assert param.to_local().untyped_storage().nbytes() == 4 * padded_rows * param[0:1].numel()
    if world_size == 4:
        assert model.values[1].to_local().untyped_storage().nbytes() == 16
        assert model.values[1].to_local().shape == ((1, 4) if rank == 0 else (0, 4))


@on_ranks(4)
def test_numel_on_the_wire(rank: int, world_size: int) -> None:
    """Behaviour 23: (3, 3) and (3,) over 4 ranks: one row each, gathered 4 x 4, reduced to 4."""
    model = fully_shard(Bag((3, 3), (3,)), reshard_after_forward=True)
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "all_gather") == [("", 16), ("", 16)]
    assert numels(log, "reduce_scatter") == [("", 4)]
    assert {event.group_size for event in log if event.numel} == {4}


class Spy(nn.Module):
    """A linear layer that keeps what its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.linear.weight, self.linear.bias]
        return self.linear(x)


@on_ranks(2)
def test_unsharded_parameter(rank: int, world_size: int) -> None:
    """Behaviour 24: in forward, plain leaf nn.Parameters with the original shape and values."""
    plain = Spy()
    model = sharded_copy(plain, lambda m: fully_shard(m, reshard_after_forward=False))
    model(batch(0, rank, 4))
    for seen, old in zip(model.seen, plain.parameters(), strict=True):
        assert type(seen) is nn.Parameter and not isinstance(seen, DTensor)
        assert seen.is_leaf and seen.requires_grad and seen.is_contiguous()
        assert torch.equal(seen, old)


@on_ranks(2)
def test_requires_grad_is_synced_at_unshard(rank: int, world_size: int) -> None:
    """Behaviour 24: freezing and unfreezing after sharding, between iterations, works."""
    model = fully_shard(Spy())
    for frozen in (False, True, False):
        model.linear.weight.requires_grad_(not frozen)
        model.zero_grad()
        run_step(model, rank)
        assert [seen.requires_grad for seen in model.seen] == [not frozen, True]
        assert (model.linear.weight.grad is None) == frozen
        assert model.linear.bias.grad is not None


@on_ranks(2)
def test_identity_and_storage(rank: int, world_size: int) -> None:
    """Behaviour 25: one sharded and one unsharded object for life; the storage goes and comes."""
    model = fully_shard(Spy(), reshard_after_forward=True)
    sharded = list(model.parameters())
    unsharded: list[list[nn.Parameter]] = []
    for step in range(3):
        run_step(model, rank, step)
        unsharded.append(model.seen)
        assert all(param is first for param, first in zip(model.parameters(), sharded, strict=True))
        assert [seen.untyped_storage().nbytes() for seen in model.seen] == [0, 0]
    assert all(now is first for each in unsharded for now, first in zip(each, unsharded[0], strict=True))
    model.unshard()
    assert all(param is first for param, first in zip(model.parameters(), unsharded[0], strict=True))
    assert all(param.untyped_storage().nbytes() >= param.nbytes for param in model.parameters())
    model.reshard()
    assert [seen.untyped_storage().nbytes() for seen in unsharded[0]] == [0, 0]


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True])
def test_gradients(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 26: DTensors laid out like their parameters, also where this rank has no rows."""
    model = fully_shard(Bag(*SHAPES), mesh=mesh_2d(world_size // 2, 2) if hsdp else None)
    run_step(model, rank)
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        assert (param.grad.device_mesh, param.grad.placements) == (param.device_mesh, param.placements)
        assert param.grad.shape == param.shape and param.grad.stride() == param.stride()
        assert param.grad.to_local().shape == param.to_local().shape
        assert param.grad.to_local().is_contiguous()


@on_ranks(2, 4)
def test_gradients_of_a_group_share_a_buffer(rank: int, world_size: int) -> None:
    """Behaviour 26: the shards of one group's gradients view the output of one reduce-scatter."""
    model = fully_shard(Bag(*SHAPES))
    run_step(model, rank)
    storages = {param.grad.to_local().untyped_storage().data_ptr() for param in model.parameters()}
    assert len(storages) == 1


def largest_dim(param: nn.Parameter) -> Shard:
    """A placement function: the dim with the most elements."""
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True])
def test_placement_fn(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 27: None is Shard(0), and negative dims count from the end."""
    results = {(4, 8): Shard(1), (8, 4): Shard(-2), (8, 2, 3): Shard(-3), (4,): None, (2, 4, 4): Shard(-1)}
    plain = Bag(*results)
    mesh = mesh_2d(world_size // 2, 2) if hsdp else init_device_mesh("cpu", (world_size,))
    asked: list[tuple[int, ...]] = []

    def placement(param: nn.Parameter) -> Shard | None:
        asked.append(tuple(param.shape))
        return results[asked[-1]]

    model = sharded_copy(plain, lambda m: fully_shard(m, mesh=mesh, shard_placement_fn=placement))
    assert set(asked) == set(results), "asked about every parameter"
    shard_rank, size = (mesh.get_local_rank("shard"), 2) if hsdp else (rank, world_size)
    for param, old, dim in zip(model.parameters(), plain.parameters(), (1, 0, 0, 0, 2), strict=True):
        assert param.placements == ((Replicate(), Shard(dim)) if hsdp else (Shard(dim),))
        assert torch.equal(param.to_local(), rows(old, shard_rank, size, dim))
    check_step(model, plain, rank, world_size)


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", MLP_SHAPES)
def test_sharding_on_other_dims(rank: int, world_size: int, shape: tuple[int, int, int]) -> None:
    """Behaviour 28: parameters of all forms, gradients and their locals are contiguous; values are right."""
    plain = mlp(*shape)
    model = sharded_copy(plain, lambda m: fully_shard(m, shard_placement_fn=largest_dim, reshard_after_forward=False))
    x = batch(0, rank, shape[0])
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(param), old)
        assert param.is_contiguous() and param.to_local().is_contiguous()
    loss = model(x).square().mean()
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.is_contiguous() and torch.equal(param, old)
    loss.backward()
    for param in model.parameters():
        assert param.grad.is_contiguous() and param.grad.to_local().is_contiguous()
    assert_gradients(model, reference_grads(plain, world_size, dim=shape[0]))


def expert_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All four ranks; and this rank's pair of them."""
    return init_device_mesh("cpu", (4,)), mesh_2d(2, 2)["shard"]


def split_groups(model: nn.Module) -> nn.Module:
    """Layer 1 of `model` on the pair mesh, the rest on all ranks, in one unit."""
    everyone, pair = expert_meshes()
    experts = set(model[1].parameters())
    return fully_shard(
        model,
        mesh=everyone,
        reshard_after_forward=True,
        shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), pair if param in experts else everyone),
    )


@on_ranks(4)
def test_groups_per_mesh(rank: int, world_size: int) -> None:
    """Behaviour 29: one group per mesh, gathered in order, reduced in reverse; each averages over its own ranks."""
    plain = linears(3)
    model = copy.deepcopy(plain)
    split_groups(model)
    pair = expert_meshes()[1]
    assert model[1].weight.device_mesh.size() == 2 and model[0].weight.device_mesh.size() == 4
    assert torch.equal(model[1].weight.to_local(), rows(plain[1].weight, pair.get_local_rank(), 2))
    with events.record() as log:
        run_step(model, rank)
    gathers = [(event.numel, event.group_size) for event in log if event.kind == "all_gather"]
    assert gathers[:2] == [(40, 4), (20, 2)]
    assert len(gathers) == 4
    assert {event.group_size for event in log if event.kind == "reduce_scatter"} == {4, 2}
    assert is_sharded(model)
    expected = reference_grads(plain, world_size)
    for name, grad in _pair_grads(plain, rank).items():
        if name.startswith("1."):
            expected[name] = grad
    assert_gradients(model, expected)


def _pair_grads(plain: nn.Module, rank: int) -> dict[str, Any]:
    """The mean gradients over this rank's pair."""
    first = rank // 2 * 2
    return mean_gradients(plain, 2, lambda model, which: run_step(model, first + which))


@on_ranks(4)
def test_groups_per_mesh_reduce_in_reverse(rank: int, world_size: int) -> None:
    """Behaviour 29: where both groups wait for the end of backward, the later group is reduced first."""
    model = linears(3)
    split_groups(model)
    model.set_reduce_scatter_unused_params(True)
    with events.record() as log:
        run_step(model, rank)
    assert [event.group_size for event in log if event.kind == "reduce_scatter"] == [2, 4]


@on_ranks(4)
def test_groups_per_mesh_train_on(rank: int, world_size: int) -> None:
    """Behaviour 29, 30: reductions of several groups in flight at a time do not mix up their results."""
    plain = nn.ModuleList([linears(3), linears(3)])
    models = [split_groups(copy.deepcopy(part)) for part in plain]
    for step in range(3):
        for model, part in zip(models, plain, strict=True):
            model.set_reduce_scatter_max_input_buffers(step + 1)
            model.zero_grad()
            run_step(model, rank, step)
            grads = reference_grads(part, world_size, step)
            assert_gradients(model[0], {name[2:]: grad for name, grad in grads.items() if name.startswith("0.")})
            expected = shard_like(_step_pair(part, rank, step)["1.weight"], model[1].weight)
            torch.testing.assert_close(local(model[1].weight.grad), expected)


def _step_pair(plain: nn.Module, rank: int, step: int) -> dict[str, Any]:
    first = rank // 2 * 2
    return mean_gradients(plain, 2, lambda model, which: run_step(model, first + which, step))


@on_ranks(2)
def test_units_of_groups_keep_their_names(rank: int, world_size: int) -> None:
    """Behaviour 29: the groups of one unit share its FQN."""
    model = nn.Sequential(linears(2))
    meshes = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]]
    fully_shard(model[0], shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), meshes[param.ndim - 1]))
    fully_shard(model)
    with events.record() as log:
        model(batch(0, rank, 4))
    assert set(units(log, "all_gather")) == {"0"}
    assert {event.group_size for event in log if event.kind == "all_gather"} == {2}, "one rank gathers nothing"


@on_ranks(2)
def test_parameter_got_another_mesh_object(rank: int, world_size: int) -> None:
    """`nn.Parameter(dtensor)` detaches, and DTensor's dispatch took the spec from its cache: the mesh was equal
    to the caller's, but that of an earlier model, with process groups of its own."""
    kept = []
    for _ in range(3):
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert model.weight.device_mesh is mesh
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.device_mesh is mesh
        kept.append(mesh)
