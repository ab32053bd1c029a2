"""What a `fully_shard` call takes under management, and what it leaves alone (tests/behaviour.md, section B)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import (
    Transformer,
    check_step,
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
from tests.helpers.parity_models import assert_gradients, batch, mesh_2d
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
@pytest.mark.parametrize("tied", ["parameter", "module"])
def test_aliases_switch_together(rank: int, world_size: int, tied: str) -> None:
    """Behaviour 13: `a.weight is b.weight` in every form, and the parameter is listed once."""
    model = Transformer(tied=True) if tied == "parameter" else linears(3)
    if tied == "module":
        model[2] = model[0]
    first, second = (model.embed, model.head) if tied == "parameter" else (model[0], model[2])
    num_params = len(list(model.parameters()))
    fully_shard(model, reshard_after_forward=False)
    for form, change in ((DTensor, lambda: None), (nn.Parameter, model.unshard), (DTensor, model.reshard)):
        change()
        assert first.weight is second.weight
        assert type(first.weight.data) is (DTensor if form is DTensor else Tensor)
        assert len(list(model.parameters())) == num_params


@on_ranks(2, 4)
def test_default_mesh(rank: int, world_size: int) -> None:
    """Behaviour 14: without a mesh, all ranks of the default group."""
    model = fully_shard(nn.Linear(4, 4))
    mesh = model.weight.device_mesh
    assert mesh.ndim == 1 and mesh.size() == world_size and mesh.device_type == "cpu"


@on_ranks(2)
def test_default_mesh_inside_meta_device(rank: int, world_size: int) -> None:
    """Behaviour 14: also while everything new is on meta."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        fully_shard(model)
    assert model.weight.is_meta and model.weight.device_mesh.size() == world_size
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
@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_mesh_from_group(rank: int, world_size: int, kind: str) -> None:
    """Behaviour 15: a mesh made of existing groups trains as one that makes its own."""
    if kind == "1d":
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    else:
        made = mesh_2d(2, 2)
        groups = [made.get_group("replicate"), made.get_group("shard")]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=made.mesh, mesh_dim_names=("replicate", "shard"))
    plain = linears(2)
    model = sharded_copy(plain, lambda m: (fully_shard(m[0], mesh=mesh), fully_shard(m, mesh=mesh)))
    check_step(model, plain, rank, world_size)


@on_ranks(2)
def test_mesh_of_some_ranks(rank: int, world_size: int) -> None:
    """Behaviour 15: each rank's own one-rank mesh: still DTensors, gradients of its own batch only."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("apart", "shard"))["shard"]
    plain = linears(1)
    model = sharded_copy(plain, lambda m: fully_shard(m, mesh=mesh))
    run_step(model, rank)
    run_step(plain, rank)
    assert is_sharded(model)
    torch.testing.assert_close(model[0].weight.grad.to_local(), plain[0].weight.grad)


@on_ranks(2)
def test_meta_and_ignored_parameters_stay(rank: int, world_size: int) -> None:
    """Behaviour 16, 93: meta parameters stay on meta; ignored ones are not touched at all."""
    model = linears(2)
    model[1].to("meta")
    ignored = model[0].bias
    fully_shard(model, ignored_params={ignored})
    assert model[0].bias is ignored
    assert model[0].weight.device.type == "cpu" and isinstance(model[0].weight, DTensor)
    assert model[1].weight.is_meta and isinstance(model[1].weight, DTensor)


class WithBuffers(nn.Module):
    """Floating-point and integer buffers, looked at in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        assert self.linear.weight.dtype == torch.bfloat16
        self.num_calls += 1
        for buffer, dtype in ((self.scale, torch.float32), (self.num_calls, torch.int64)):
            assert type(buffer) is Tensor and buffer.dtype == dtype
        return self.linear(x) * self.scale.to(x.dtype)


@on_ranks(2)
def test_buffers_are_neither_sharded_nor_cast(rank: int, world_size: int) -> None:
    """Behaviour 16, 119: buffers stay plain tensors of their dtype under a bf16 policy, in forward and after."""
    model = fully_shard(WithBuffers(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    scale = model.scale
    run_step(model, rank)
    assert model.scale is scale and scale.tolist() == [2.0] * 4
    assert model.num_calls == 1


class Doubled(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@on_ranks(2)
def test_module_without_parameters(rank: int, world_size: int) -> None:
    """Behaviour 17: works as a unit of its own, and as a root above others; it communicates nothing."""
    alone = fully_shard(Doubled())
    x = torch.ones(2, requires_grad=True)
    with events.record() as log:
        alone.unshard()
        alone(x).sum().backward()
        alone.reshard()
    assert x.grad.tolist() == [2, 2]
    assert not any(event.kind in ("all_gather", "reduce_scatter", "all_reduce") for event in log)

    plain = nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4))
    model = sharded_copy(plain, lambda m: [fully_shard(each) for each in (m[0], m[1], m[2], m)])
    with events.record() as log:
        run_step(model, rank)
    assert units(log, "all_gather")[:2] == ["0", "2"] and set(units(log, "reduce_scatter")) == {"0", "2"}
    assert_gradients(model, reference_grads(plain, world_size))


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
    plain = WithEmpty(shape)
    model = sharded_copy(plain, fully_shard)
    check_step(model, plain, rank, world_size)
    assert model.empty.grad.shape == shape


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


def _train_list(rank: int, world_size: int, together: Any) -> list[events.Event]:
    plain = linears(3)
    model = copy.deepcopy(plain)
    modules = together(model)
    assert fully_shard(modules) is modules
    fully_shard(model)
    with events.record() as log:
        run_step(model, rank)
    assert_gradients(model, reference_grads(plain, world_size))
    assert all(is_sharded(module) for module in modules)
    return log


@on_ranks(2)
@pytest.mark.parametrize("kind", [list, tuple])
def test_list_is_one_group(rank: int, world_size: int, kind: type) -> None:
    """Behaviour 19: one all-gather a pass, one reduce-scatter, and the two names joined."""
    log = _train_list(rank, world_size, lambda model: kind((model[0], model[1])))
    assert numels(log, "all_gather")[:2] == [("", 20), ("0, 1", 40)]
    assert numels(log, "reduce_scatter").count(("0, 1", 20)) == 1
    assert units(log, "reduce_scatter").count("") == 1 and len(units(log, "reduce_scatter")) == 2


@on_ranks(2)
def test_list_may_hold_containers(rank: int, world_size: int) -> None:
    """Behaviour 19: a ModuleList in a list of modules is fine, other than alone."""

    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    plain = Container()
    model = copy.deepcopy(plain)
    fully_shard([model.layers, model.last], reshard_after_forward=False)
    fully_shard(model)
    model.last.unshard()
    assert is_unsharded(model), "one group"
    model.last.reshard()
    assert is_sharded(model)
    model.last.unshard()  # a ModuleList never runs, so its parameters are gathered by hand
    loss = model(batch(0, rank, 4)).square().mean()
    loss.backward()
    assert_gradients(model, reference_grads(plain, world_size))
