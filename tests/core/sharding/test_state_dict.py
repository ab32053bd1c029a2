"""State dicts: silent, live, loaded in place or by assignment, from full tensors too (Behaviour 167-170)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.parity_models import (
    Stack,
    assert_gradients,
    batch,
    count,
    full,
    local,
    mean_gradients,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


def step(model: nn.Module, rank: int, index: int = 0) -> None:
    model(batch(index, rank)).square().sum().backward()


def sharded(**options: Any) -> tuple[Stack, Any]:
    plain = Stack(depth=2)
    return plain, shard_blocks(fsdp2, copy.deepcopy(plain), **options)


def check_training(model: nn.Module, plain: nn.Module, rank: int, world_size: int) -> None:
    """Values and gradients are those of `plain`."""
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(param), expected, msg=name)
    model.zero_grad()
    step(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
@pytest.mark.parametrize("when", ["before", "after_forward", "after_backward", "unsharded"])
def test_state_dict_is_sharded_and_silent(rank: int, world_size: int, raf: bool | None, when: str) -> None:
    """Behaviour 167: DTensors under the plain names, whatever the parameters' form was; silent; resharded after."""
    plain, model = sharded(reshard_after_forward=raf)
    if when == "after_forward":
        model(batch(0, rank))
    elif when == "after_backward":
        step(model, rank)
    elif when == "unsharded":
        model(batch(0, rank))
        model.unshard()
        model.blocks[0].unshard()
    with CommDebugMode() as comms, events.record() as log:
        state = model.state_dict()
    assert comms.get_total_counts() == 0
    assert count(log, "unshard", "all_gather") == {"unshard": 0, "all_gather": 0}
    assert list(state) == list(plain.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for name, value in plain.state_dict().items():
        assert_close(state[name].full_tensor(), value)
    if when == "before":
        check_training(model, plain, rank, world_size)


@on_ranks(2)
def test_state_dict_between_forward_and_backward(rank: int, world_size: int) -> None:
    """Behaviour 76, 167: what was resharded for the state dict is gathered again for backward."""
    plain, model = sharded(reshard_after_forward=False)
    loss = model(batch(0, rank)).square().sum()
    model.state_dict()
    with events.record() as log:
        loss.backward()
    assert count(log, "all_gather") == {"all_gather": 3}
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2, 4)
def test_cached_state_dict_stays_live(rank: int, world_size: int) -> None:
    """Behaviour 168: its values share storage with the parameters, through steps."""
    _, model = sharded()
    state = model.state_dict()
    pointers = [local(value).data_ptr() for value in state.values()]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: local(value).clone() for name, value in state.items()}
    for index in range(2):
        step(model, rank, index)
        optim.step()
        optim.zero_grad()
    assert [local(param.detach()).data_ptr() for param in model.parameters()] == pointers
    for name, param in model.named_parameters():
        assert torch.equal(local(state[name]), local(param.detach()))
        assert before[name].numel() == 0 or not torch.equal(local(state[name]), before[name])


def other_values(plain: nn.Module, model: Any) -> tuple[dict[str, Tensor], dict[str, DTensor]]:
    """A full and a sharded state dict with other values than the model's."""
    whole = {name: torch.randn(value.shape) for name, value in plain.state_dict().items()}
    return whole, {
        name: distribute_tensor(whole[name], value.device_mesh, value.placements)
        for name, value in model.state_dict().items()
    }


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["sharded", "unsharded"])
def test_load_in_place(rank: int, world_size: int, when: str) -> None:
    """Behaviour 169: values are copied into the shards, also while unsharded, and the next forward computes with
    them."""
    plain, model = sharded(reshard_after_forward=False)
    pointers = [local(param.detach()).data_ptr() for param in model.parameters()]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, state = other_values(plain, model)
    if when == "unsharded":
        model(batch(0, rank))
    model.load_state_dict(state)
    plain.load_state_dict(whole)
    assert [local(param.detach()).data_ptr() for param in model.parameters()] == pointers
    check_training(model, plain, rank, world_size)
    assert {id(p) for p in optim.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["before", "after"])
def test_load_by_assignment(rank: int, world_size: int, when: str) -> None:
    """Behaviour 169: `assign=True` swaps tensors in, before and after the first forward; requires_grad, padding
    stay."""
    plain, model = sharded()
    model.inp.bias.requires_grad_(False)
    plain.inp.bias.requires_grad_(False)
    padded = [local(param.detach()).untyped_storage().nbytes() for param in model.parameters()]
    if when == "after":
        step(model, rank)
    whole, state = other_values(plain, model)
    model.load_state_dict(state, assign=True)
    plain.load_state_dict(whole)
    assert [param.requires_grad for param in model.parameters()] == [
        param.requires_grad for param in plain.parameters()
    ]
    check_training(model, plain, rank, world_size)
    assert [local(param.detach()).untyped_storage().nbytes() for param in model.parameters()] == padded
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        same = torch.equal(full(param), plain_param)
        assert same == (not param.requires_grad)


def dim1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else None


@on_ranks(2, 4)
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "dim1"])
def test_full_state_dict_into_a_meta_model(rank: int, world_size: int, layout: str) -> None:
    """Behaviour 31, 170: full tensors on rank 0, broadcast, distributed and assigned, make a meta model exact."""
    options: dict[str, Any] = {}
    if layout == "hsdp":
        options["mesh"] = mesh_2d(2, world_size // 2)
    if layout == "dim1":
        options["shard_placement_fn"] = dim1
    plain, source = sharded(**options)
    state = {name: value.full_tensor() for name, value in source.state_dict().items()}
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
    with torch.device("meta"):
        model: Any = Stack(depth=2)
    shard_blocks(fsdp2, model, **options)
    loaded = {}
    for name, param in model.state_dict().items():
        assert local(param).is_meta
        tensor = state[name] if rank == 0 else torch.empty(param.shape)
        dist.broadcast(tensor, 0)
        loaded[name] = distribute_tensor(tensor, param.device_mesh, param.placements)
    model.load_state_dict(loaded, assign=True)
    for (name, param), expected in zip(model.named_parameters(), source.parameters(), strict=True):
        assert param.placements == expected.placements
        assert torch.equal(local(param.detach()), local(expected.detach())), name
    check_training(model, plain, rank, world_size)


@on_ranks(2)
def test_buffers_and_frozen_parameters(rank: int, world_size: int) -> None:
    """Behaviour 16, 167: buffers stay plain tensors in the state dict; frozen parameters are in it."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    names = list(model.state_dict())
    fully_shard(model)
    state = model.state_dict()
    assert list(state) == names
    assert not isinstance(state["1.running_mean"], DTensor)
    assert isinstance(state["0.weight"], DTensor)


@on_ranks(2)
def test_state_dict_of_a_child(rank: int, world_size: int) -> None:
    """Behaviour 167: a child's own state dict is sharded too, with the child's names."""
    plain, model = sharded(reshard_after_forward=False)
    model(batch(0, rank))
    state = model.blocks[0].state_dict()
    assert list(state) == list(plain.blocks[0].state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
