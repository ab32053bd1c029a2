"""`dp_mesh_dims`: parameters are DTensors on one mesh of all axes, some of which are data parallel (Behaviour
163-165)."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import fsdp2
from tests.helpers.parity_models import Race, Stack, batch, mean_gradients, shard_blocks, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import assert_tp_gradients, count_comms, mesh_of, quiet

REPLICATE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)


@dataclass(frozen=True)
class Layout:
    """A full mesh, its data-parallel axes, and how parameters must lie on which axes after sharding.

    Attributes:
        sizes: of the mesh's axes.
        names: of the mesh's axes.
        shard: the axes to shard over.
        replicate: the axes to replicate over.
        up: placements of `blocks.0.up.weight`, whose rows are TP-sharded where there is a "tp" axis.
        out: placements of `out.weight`, which TP leaves alone.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    shard: str | tuple[str, ...] | None
    replicate: str | tuple[str, ...] | None
    up: tuple[Placement, ...]
    out: tuple[Placement, ...]

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.sizes, self.names)

    def axes(self, role: str | tuple[str, ...] | None) -> list[int]:
        names = (role,) if isinstance(role, str) else role or ()
        return [self.names.index(name) for name in names]

    @property
    def data_axes(self) -> list[int]:
        """In the order of the mesh."""
        return sorted(self.axes(self.shard) + self.axes(self.replicate))

    @property
    def data_ranks(self) -> int:
        size = 1
        for axis in self.data_axes:
            size *= self.sizes[axis]
        return size

    @property
    def data_rank(self) -> int:
        position = 0
        for axis in self.data_axes:
            position = position * self.sizes[axis] + self.mesh.get_local_rank(axis)
        return position

    @property
    def exact(self) -> bool:
        """No sum has more than two terms: the order of summation says nothing."""
        return all(sum(self.sizes[axis] > 1 for axis in self.axes(role)) <= 1 for role in (self.shard, self.replicate))


# Several shard axes become one, of a flattened mesh; replicate axes stay, except that with several shard axes they come
# first; all other axes stay as they are.
LAYOUTS = {
    "shard,tp": Layout((2, 2), ("dp", "tp"), "dp", None, (STRIDED, ROWS), (ROWS, REPLICATE)),
    "tp,shard": Layout((2, 2), ("tp", "dp"), "dp", None, (ROWS, ROWS), (REPLICATE, ROWS)),
    "shard,shard": Layout((2, 2), ("dp0", "dp1"), ("dp0", "dp1"), None, (ROWS,), (ROWS,)),
    "shard,shard,tp": Layout((2, 1, 2), ("dp0", "dp1", "tp"), ("dp0", "dp1"), None, (STRIDED, ROWS), (ROWS, REPLICATE)),
    "replicate,shard": Layout((2, 2), ("r", "s"), "s", "r", (REPLICATE, ROWS), (REPLICATE, ROWS)),
    "shard,replicate": Layout((2, 2), ("s", "r"), "s", "r", (ROWS, REPLICATE), (ROWS, REPLICATE)),
    "replicate,shard,tp": Layout(
        (1, 2, 2), ("r", "s", "tp"), "s", "r", (REPLICATE, STRIDED, ROWS), (REPLICATE, ROWS, REPLICATE)
    ),
    "replicate,shard,shard": Layout(
        (2, 2, 1), ("r", "s0", "s1"), ("s0", "s1"), "r", (REPLICATE, ROWS), (REPLICATE, ROWS)
    ),
    "replicate,tp": Layout((2, 2), ("dp", "tp"), None, "dp", (REPLICATE, ROWS), (REPLICATE, REPLICATE)),
    "replicate,replicate": Layout(
        (2, 2), ("r0", "r1"), None, ("r0", "r1"), (REPLICATE, REPLICATE), (REPLICATE, REPLICATE)
    ),
}
every_layout = pytest.mark.parametrize("name", LAYOUTS)


def tp_placement(name: str) -> Placement:
    """How TP shards the parameters of `Stack`."""
    if name.endswith(("up.weight", "up.bias")):
        return ROWS
    return COLUMNS if name.endswith("down.weight") else REPLICATE


def distribute(model: nn.Module, mesh: DeviceMesh, **special: list[Placement]) -> nn.Module:
    """Replace each parameter by a DTensor on the full mesh; `special` placements by the parameter's last name."""
    for prefix, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            default = [tp_placement(f"{prefix}.{name}") if axis == "tp" else REPLICATE for axis in mesh_names(mesh)]
            value = distribute_tensor(param.detach(), mesh, special.get(name, default))
            setattr(module, name, nn.Parameter(value))
    return model


def mesh_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ("",) * mesh.ndim


def shard(api: Any, model: nn.Module, layout: Layout, **options: Any) -> Any:
    """Distribute, then `fully_shard` every block and the root."""
    distribute(model, layout.mesh)
    dims = api.DataParallelMeshDims(shard=layout.shard, replicate=layout.replicate)
    return shard_blocks(api, model, mesh=layout.mesh, dp_mesh_dims=dims, **options)


def build() -> Stack:
    return Stack(dim=8, hidden=6, depth=2)


def sharded(layout: Layout, **options: Any) -> tuple[Stack, Any]:
    plain = build()
    return plain, shard(fsdp2, copy.deepcopy(plain), layout, **options)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, (fsdp2.FSDPModule, torch_fsdp.FSDPModule))


def step_of(layout: Layout) -> Any:
    """`backward(model, step, data_rank)`. The loss is this data-parallel rank's own, so that gradients are averaged.

    In even steps activations are declared Replicate over the data axes although each rank has its own, in odd steps
    they are declared Shard(0): then the weights' gradients arrive as Partial over the data axes. (Both kinds in one
    accumulated gradient do not add up, as DTensor believes what it is told.)
    """

    def backward(model: nn.Module, step: int, rank: int, data: Placement | None = None) -> Tensor:
        x = batch(step, rank)
        if is_sharded(model):
            data = data or (ROWS if step % 2 else REPLICATE)
            placements = [data if axis in layout.data_axes else REPLICATE for axis in range(len(layout.sizes))]
            y: Any = model(DTensor.from_local(x, layout.mesh, placements, run_check=False))
            loss = y.redistribute(placements=placements).to_local().float().square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return backward


# --- form -------------------------------------------------------------------------------------------------------------


@on_ranks(4)
@every_layout
def test_sharded_parameters(rank: int, world_size: int, name: str) -> None:
    """Behaviour 163, 164: placements, mesh and local part of sharded parameters; `full_tensor` restores them. Unsharded
    they are again what was given, on the full mesh."""
    layout = LAYOUTS[name]
    plain, model = sharded(layout)
    assert model.blocks[0].up.weight.placements == layout.up
    assert model.out.weight.placements == layout.out
    for fqn, param in model.named_parameters():
        value = plain.get_parameter(fqn)
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor), fqn
        assert param.device_mesh.size() == world_size, fqn
        assert param.device_mesh.ndim == len(layout.out), fqn
        assert (param.shape, param.stride()) == (value.shape, value.stride()), fqn
        assert torch.equal(param.to_local(), shard_like(value, param)), fqn
        assert torch.equal(param.full_tensor(), value), fqn
    in_shards = dict(model.named_parameters())
    for unit in (model, *model.blocks):
        unit.unshard()
    for fqn, param in model.named_parameters():
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor), fqn
        expected = tuple(tp_placement(fqn) if axis == "tp" else REPLICATE for axis in layout.names)
        assert (param.device_mesh, param.placements) == (layout.mesh, expected), fqn
        assert torch.equal(param.to_local(), shard_like(plain.get_parameter(fqn), param)), fqn
    for unit in (model, *model.blocks):
        unit.reshard()
    assert all(param is in_shards[fqn] for fqn, param in model.named_parameters())


@on_ranks(4)
@pytest.mark.parametrize("name", ["replicate,tp", "shard,shard", "replicate,shard", "tp,shard"])
def test_numbers_of_collectives(rank: int, world_size: int, name: str) -> None:
    """Behaviour 109, 163, 164: replicate axes alone gather nothing and all-reduce once a group; so does one shard."""
    layout = LAYOUTS[name]
    _, model = sharded(layout, reshard_after_forward=True)
    num_shards = max([1, *(layout.sizes[axis] for axis in layout.axes(layout.shard))])
    expected = {
        "all_gather": 6 if num_shards > 1 else 0,
        "reduce_scatter": 3 if num_shards > 1 else 0,
        "all_reduce": 3 if layout.replicate else 0,
    }
    for step in range(2):
        with count_comms() as counts, quiet():
            step_of(layout)(model, step, layout.data_rank)
        assert counts == expected


# --- training ---------------------------------------------------------------------------------------------------------


def race(layout: Layout, **options: Any) -> Race:
    """The second step has three microbatches, whose Partial gradients make one sum."""

    def backward(model: Any, step: int, data_rank: int) -> Tensor:
        loss, microbatches = torch.zeros(()), 3 if step == 1 else 1
        for micro in range(microbatches):
            if is_sharded(model):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            loss = loss + step_of(layout)(model, 3 * step + micro, data_rank, ROWS if step % 2 else REPLICATE)
        return loss

    def shard_it(api: Any, model: nn.Module) -> None:
        shard(api, model, layout, **options)

    race = Race(layout.data_rank, layout.data_ranks, build, shard_it, backward, exact=layout.exact)
    race.torch = not options and hasattr(torch_fsdp, "DataParallelMeshDims")  # torch 2.11 has none
    return race


@on_ranks(4)
@every_layout
def test_training(rank: int, world_size: int, name: str) -> None:
    """Behaviour 96, 163, 164: several Adam steps as torch's FSDP2 and as one process; also with Partial gradients."""
    race(LAYOUTS[name]).run(3)


@on_ranks(4)
@pytest.mark.parametrize("name", ["shard,tp", "shard,shard", "replicate,shard", "replicate,replicate"])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_loss_of_the_global_batch(rank: int, world_size: int, name: str, factor: float | None) -> None:
    """Behaviour 129, 163: a mean that DTensor takes over all ranks has been divided once; a divide factor of 1 is
    right."""
    layout = LAYOUTS[name]
    plain, model = sharded(layout)
    if factor is not None:
        for unit in (model, *model.blocks):
            unit.set_gradient_divide_factor(factor)
    placements = [ROWS if axis in layout.data_axes else REPLICATE for axis in range(len(layout.sizes))]
    with quiet():
        y: Any = model(DTensor.from_local(batch(1, layout.data_rank), layout.mesh, placements, run_check=False))
        y.square().mean().redistribute(placements=[REPLICATE] * len(layout.sizes)).to_local().backward()
    means = mean_gradients(plain, layout.data_ranks, lambda m, r: step_of(layout)(m, 1, r))
    expected = {fqn: None if mean is None else mean / (factor or layout.data_ranks) for fqn, mean in means.items()}
    assert_tp_gradients(model, expected)


# --- errors -----------------------------------------------------------------------------------------------------------


def linear(mesh: DeviceMesh | None, **placements: list[Placement]) -> nn.Module:
    model = nn.Linear(4, 4)
    return model if mesh is None else distribute(model, mesh, **placements)


def refused(model: nn.Module, mesh: DeviceMesh | None, *named: str, **roles: Any) -> None:
    """The call raises, says the `named`, and leaves the module as it was."""
    before, cls = dict(model.named_parameters()), type(model)
    with pytest.raises(ValueError) as caught:
        fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(**roles))
    missing = [word for word in named if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert isinstance(caught.value, fsdp2.FSDPError)
    assert type(model) is cls
    assert all(param is before[name] for name, param in model.named_parameters())


@on_ranks(4)
def test_wrong_names(rank: int, world_size: int) -> None:
    """Behaviour 165: neither role or both, a mesh without names (the default one too), an axis that does not exist."""
    mesh = LAYOUTS["shard,tp"].mesh
    nameless = init_device_mesh("cpu", (2, 2))
    refused(linear(mesh), mesh)
    refused(linear(mesh), mesh, "dp", shard="dp", replicate="dp")
    refused(linear(nameless), nameless, shard="dp")
    refused(linear(mesh), None, shard="dp")
    refused(linear(mesh), mesh, "nowhere", "dp", "tp", shard="nowhere")
    refused(linear(mesh), mesh, "nowhere", "dp", "tp", shard="dp", replicate="nowhere")
    refused(linear(mesh), mesh, "nowhere", "dp", "tp", shard=("dp", "nowhere"))


@on_ranks(4)
def test_wrong_parameters(rank: int, world_size: int) -> None:
    """Behaviour 165: a plain tensor, a sharded data axis, another mesh."""
    mesh = LAYOUTS["shard,tp"].mesh
    replicated = [REPLICATE, REPLICATE]
    refused(linear(None), mesh, "weight", shard="dp")
    refused(linear(mesh, weight=[ROWS, REPLICATE]), mesh, "dp", shard="dp")
    refused(linear(mesh, weight=[ROWS, REPLICATE]), mesh, "dp", replicate="dp")
    refused(linear(mesh, weight=[REPLICATE, ROWS]), mesh, "tp", shard="dp", replicate="tp")
    other = mesh_of((4, 1), ("dp", "tp"))
    refused(linear(other, weight=replicated), mesh, "mesh", shard="dp")
    refused(linear(mesh["tp"]), mesh, "mesh", shard="dp")


@pytest.mark.exhaustive
@on_ranks(4)
def test_reshard_to_a_smaller_group(rank: int, world_size: int) -> None:
    """Behaviour 75: an int for `reshard_after_forward` trains as one process does; torch refuses it."""
    race(LAYOUTS["shard,shard"], reshard_after_forward=2).run(2)
