"""What a `fully_shard` call takes under management, and what it leaves alone (tests/behaviour.md, section B)."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, events, fully_shard
from tests.helpers.models import (
    check_step,
    error_of,
    is_sharded,
    is_unsharded,
    linears,
    mlp,
    numels,
    reference_grads,
    run_step,
    sharded_copy,
    units,
)
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Layers, assert_gradients, mesh_2d
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_groups_take_what_earlier_calls_left(rank: int, world_size: int) -> None:
    """Behaviour 11: bottom-up, each call manages the parameters below it that no earlier call does."""
    model = nn.Sequential(linears(2), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    fully_shard(model[0][1])
    fully_shard(model[0])
    fully_shard(model)
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "all_gather")[:3] == [("", 20 + 16), ("0", 20), ("0.1", 20)]
    assert sorted(numels(log, "reduce_scatter")) == [("", 18), ("0", 10), ("0.1", 10)]


@on_ranks(2)
def test_replicated_submodules_are_left_alone(rank: int, world_size: int) -> None:
    """Behaviour 12: traversal stops at a submodule under `replicate`."""
    model = linears(2)
    replicate(model[0])
    before = list(model[0].parameters())
    fully_shard(model)
    assert all(param is old for param, old in zip(model[0].parameters(), before, strict=True))
    assert not any(isinstance(param, DTensor) for param in model[0].parameters())
    assert is_sharded(model[1])


class Twice(nn.Module):
    """One submodule, one parameter and one buffer, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.again = self.first
        self.shift = nn.Parameter(torch.ones(4))
        self.same_shift = self.shift
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("same_scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight is self.again.weight and self.shift is self.same_shift
        return self.again(self.first(x) + self.shift) * self.scale + self.same_shift


@on_ranks(2)
def test_duplicates_count_once(rank: int, world_size: int) -> None:
    """Behaviour 12, 13: shared modules and parameters are managed, gathered and reduced once."""
    plain = Twice()
    model = sharded_copy(plain, lambda m: fully_shard(m, reshard_after_forward=True))
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "all_gather") == [("", 16 + 4)] * 2
    assert numels(log, "reduce_scatter") == [("", 8 + 2)]
    assert_gradients(model, reference_grads(plain, world_size))
    assert model.scale is model.same_scale


@on_ranks(2)
def test_default_mesh_inside_meta_device(rank: int, world_size: int) -> None:
    """Behaviour 14: all ranks of the default group, also while everything new is on meta."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        fully_shard(model)
    mesh = model.weight.device_mesh
    assert model.weight.is_meta and mesh.ndim == 1 and mesh.size() == world_size and mesh.device_type == "cpu"
    model.to_empty(device="cpu")
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 0.5)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4.5))


def test_default_group_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 14: without a default group, from the environment."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", store.port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # the port is served already, as under torchrun
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not dist.is_initialized()
    try:
        model = fully_shard(nn.Linear(2, 2))
        assert dist.is_initialized() and isinstance(model.weight, DTensor)
        run_step(model, 0, dim=2)
        assert model.weight.grad.to_local().shape == (2, 2)
    finally:
        dist.destroy_process_group()


@on_ranks(4)
@pytest.mark.parametrize("kind", ["2d", "1d"])
def test_mesh_from_group(rank: int, world_size: int, kind: str) -> None:
    """Behaviour 15: a mesh made of existing groups trains as one that makes its own."""
    if kind == "1d":
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    else:
        made = mesh_2d(2, 2)
        groups = [made.get_group("replicate"), made.get_group("shard")]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=made.mesh, mesh_dim_names=("replicate", "shard"))
    plain = linears(2)
    check_step(in_units(plain, mesh=mesh), plain, rank, world_size)


class Doubled(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@on_ranks(2)
def test_module_without_parameters(rank: int, world_size: int) -> None:
    """Behaviour 17, 79: a unit of its own, and a root above others; it communicates nothing, and gives handles."""
    alone = fully_shard(Doubled())
    x = torch.ones(2, requires_grad=True)
    with events.record() as log:
        assert alone.unshard() is None
        alone.unshard(async_op=True).wait()
        alone(x).sum().backward()
        alone.reshard()
    assert x.grad.tolist() == [2, 2]
    assert not any(event.kind in ("all_gather", "reduce_scatter", "all_reduce") for event in log)

    plain = nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4))
    model = sharded_copy(plain, lambda m: [fully_shard(each) for each in (m[0], m[1], m[2], m)])
    with events.record() as log:
        check_step(model, plain, rank, world_size)
    assert units(log, "all_gather")[:2] == ["0", "2"] and set(units(log, "reduce_scatter")) == {"0", "2"}


class WithEmpty(nn.Module):
    """A parameter without elements beside one with."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(shape))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.empty.sum()


@on_ranks(2)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_zero_element_parameters(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """Behaviour 17: parameters without elements are allowed, and get gradients without elements."""
    plain = nn.Sequential(WithEmpty(shape), WithEmpty(shape))
    model: Any = copy.deepcopy(plain)
    fully_shard(model[1].linear)  # model[1] has nothing else: its gather has nothing to copy out
    for module in (*model, model):
        fully_shard(module)
    check_step(model, plain, rank, world_size)
    assert model[0].empty.grad.shape == model[1].empty.grad.shape == shape


@on_ranks(2)
def test_parameter_objects_are_replaced(rank: int, world_size: int) -> None:
    """Behaviour 18: new objects; names and order are kept. Beyond it, so is what users noted on the old ones."""
    model = mlp(4, 5, 4)
    names = [name for name, _ in model.named_parameters()]
    old = dict(model.named_parameters())
    for param in old.values():
        param.note = "mine"  # type: ignore[attr-defined]
    fully_shard(model[2])
    fully_shard(model)
    assert [name for name, _ in model.named_parameters()] == names
    for name, param in model.named_parameters():
        assert param is not old[name] and param.note == "mine"
    run_step(model, rank)
    assert [name for name, _ in model.named_parameters()] == names


@on_ranks(2)
@pytest.mark.parametrize("kind", [list, tuple])
def test_list_is_one_group(rank: int, world_size: int, kind: type) -> None:
    """Behaviour 19: one all-gather a pass, one reduce-scatter, and the two names joined."""
    plain = linears(3)
    model: Any = copy.deepcopy(plain)
    modules = kind((model[0], model[1]))
    assert fully_shard(modules) is modules
    fully_shard(model)
    with events.record() as log:
        check_step(model, plain, rank, world_size)
    assert numels(log, "all_gather")[:2] == [("", 20), ("0, 1", 40)]
    assert sorted(numels(log, "reduce_scatter")) == [("", 10), ("0, 1", 20)]


@on_ranks(2)
def test_list_may_hold_containers(rank: int, world_size: int) -> None:
    """Behaviour 19: a ModuleList in a list of modules is fine; it never runs, so it is gathered by hand."""
    plain = Layers(2)
    model: Any = copy.deepcopy(plain)
    fully_shard([model.layers], reshard_after_forward=False)
    fully_shard(model)
    model.layers.unshard()
    assert is_unsharded(model.layers), "one group"
    check_step(model, plain, rank, world_size)


# --- names, the class swap, recursion of setters (section A) ----------------------------------------------------------


RECURSIVE = [
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_keep_unsharded_storage",
]


class Special(nn.Linear):
    """A class of the user's own."""


@on_ranks(2)
def test_class_is_swapped(rank: int, world_size: int) -> None:
    """Behaviour 3, 4: a generated class, one per original class; children keep theirs."""
    model = nn.Sequential(Special(2, 2), Special(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model[1])
    assert type(model) is nn.Sequential
    fully_shard(model)
    assert type(model[0]) is type(model[1])
    assert type(model[0]).__name__ == "FSDPSpecial"
    assert type(model[0]).__bases__ == (FSDPModule, Special)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model).__bases__ == (FSDPModule, nn.Sequential)
    assert isinstance(model[0], Special) and isinstance(model[0], FSDPModule)
    assert type(model[2]) is nn.Linear


@on_ranks(2)
def test_state(rank: int, world_size: int) -> None:
    """Behaviour 6: None for a plain module, distinct for each call, one for all modules of a list."""
    model = linears(5)
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard([model[2], model[3]])
    state = fully_shard.state
    assert state(model) is None and state(model[4]) is None
    assert state(model[0]) is not None and state(model[0]) is not state(model[1])
    assert state(model[2]) is not None and state(model[2]) is state(model[3])


@on_ranks(2)
def test_pickling_is_refused(rank: int, world_size: int) -> None:
    """Behaviour 7: pickle fails early, and says what to do."""
    assert "state_dict" in error_of(AssertionError, lambda: pickle.dumps(fully_shard(nn.Linear(2, 2))))


def test_which_methods_are_recursive() -> None:
    """Behaviour 9, 10: by default, and `recurse` is keyword-only but in one; all others act on one unit."""
    found = {}
    for name, method in inspect.getmembers(FSDPModule, inspect.isfunction):
        if name.startswith("_") or name in dir(nn.Module):
            continue
        if (recurse := inspect.signature(method).parameters.get("recurse")) is not None:
            assert recurse.default is True
            found[name] = recurse.kind
    keyword, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert found == {**dict.fromkeys(RECURSIVE, keyword), "set_reshard_after_forward": positional}
