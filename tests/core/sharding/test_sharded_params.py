"""The forms of a parameter: DTensor on this rank's rows, plain tensor, and their gradients
(tests/behaviour.md, section C)."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import ShardPlacementResult, events, fully_shard
from tests.helpers.models import check_step, is_sharded, linears, numels, reference_grads, run_step, sharded_copy
from tests.helpers.parity_models import assert_gradients, full, mean_gradients, mesh_2d
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


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_sharded_parameter(rank: int, world_size: int, requires_grad: bool) -> None:
    """Behaviour 20-22, 26: a leaf DTensor and nn.Parameter: this rank's chunk, in a storage of ceil(dim0 / S) rows. Its
    gradient is laid out as it is, also where this rank has no rows: views of one reduction."""
    plain = Bag(*SHAPES, requires_grad=requires_grad)
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded_copy(plain, lambda m: fully_shard(m, mesh=mesh))
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.is_leaf and param.requires_grad == requires_grad and param.grad is None
        assert (param.shape, param.stride(), param.dtype) == (old.shape, old.stride(), old.dtype)
        assert param.device_mesh == mesh and param.placements == (Shard(0),)
        assert torch.equal(param.to_local(), rows(old, rank, world_size)) and param.to_local().is_contiguous()
        padded_rows = -(-param.shape[0] // world_size)
        assert param.to_local().untyped_storage().nbytes() == 4 * padded_rows * param[0:1].numel()
        assert torch.equal(full(param), old)
    if not requires_grad:
        return
    check_step(model, plain, rank, world_size)
    for param in model.parameters():
        assert (param.grad.device_mesh, param.grad.placements) == (mesh, param.placements)
        assert (param.grad.shape, param.grad.stride()) == (param.shape, param.stride())
        assert param.grad.to_local().shape == param.to_local().shape and param.grad.to_local().is_contiguous()
    assert len({param.grad.to_local().untyped_storage().data_ptr() for param in model.parameters()}) == 1


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


@on_ranks(4)
def test_groups_per_mesh(rank: int, world_size: int) -> None:
    """Behaviour 29, 30: gathered in order, reduced in reverse, averaged over their own ranks; results do not mix."""
    plain = linears(3)
    model: Any = copy.deepcopy(plain)
    everyone, pair = init_device_mesh("cpu", (4,)), mesh_2d(2, 2)["shard"]
    experts = set(model[1].parameters())

    def place(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), pair if param in experts else everyone)

    fully_shard(model, mesh=everyone, reshard_after_forward=True, shard_placement_fn=place)
    assert model[1].weight.device_mesh.size() == 2 and model[0].weight.device_mesh.size() == 4
    assert torch.equal(model[1].weight.to_local(), rows(plain[1].weight, pair.get_local_rank(), 2))
    for step in range(3):
        model.set_reduce_scatter_max_input_buffers(step + 1)
        model.set_reduce_scatter_unused_params(step == 2)  # both groups wait for the end of backward then
        model.zero_grad()
        with events.record() as log:
            run_step(model, rank, step)
        gathers = [(event.numel, event.group_size) for event in log if event.kind == "all_gather"]
        assert gathers[:2] == [(40, 4), (20, 2)] and len(gathers) == 4
        scatters = [event.group_size for event in log if event.kind == "reduce_scatter"]
        assert scatters == [2, 4] or (step < 2 and sorted(scatters) == [2, 4])
        assert is_sharded(model)
        of_pair = mean_gradients(plain, 2, lambda m, which, step=step: run_step(m, rank // 2 * 2 + which, step))
        expected = reference_grads(plain, world_size, step)
        assert_gradients(model, expected | {name: grad for name, grad in of_pair.items() if name.startswith("1.")})


@on_ranks(2)
def test_parameter_got_another_mesh_object(rank: int, world_size: int) -> None:
    """DTensor's dispatch took a spec from its cache: with an equal mesh, that of an earlier model."""
    kept = []
    for _ in range(3):
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert model.weight.device_mesh is mesh
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.device_mesh is mesh
        kept.append(mesh)


# --- who keeps what alive ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_del_model_frees_it_without_the_garbage_collector(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model(torch.randn(2, 4)).sum().backward()
    units = [weakref.ref(fully_shard.state(module)) for module in model.modules()]
    modules = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model, layer
        assert [ref() for ref in modules] == [None] * 3
        assert [ref() for ref in units] == [None] * 3
    finally:
        gc.enable()


@on_ranks(2)
def test_original_parameters_are_freed_as_they_are_sharded(rank: int, world_size: int) -> None:
    """Behaviour 188: the whole data is freed as soon as the shard is made."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    originals = [layer.weight.untyped_storage()._weak_ref() for layer in layers]
    fully_shard(layers)
    assert all(torch.UntypedStorage._expired(original) for original in originals)
    for original in originals:
        torch.UntypedStorage._free_weak_ref(original)
