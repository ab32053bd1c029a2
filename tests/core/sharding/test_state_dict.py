"""State dicts: silent, live, loaded in place or by assignment, from full tensors too (Behaviour 167-170)."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from fsdp2 import events
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import Stack, batch, count, full, local
from tests.helpers.ranks import on_ranks


def step(model: nn.Module, rank: int, index: int = 0) -> None:
    model(batch(index, rank)).square().sum().backward()


def sharded(**options: Any) -> tuple[Stack, Any]:
    plain = Stack(depth=2)
    return plain, in_units(plain, **options)


def check_training(model: nn.Module, plain: nn.Module, rank: int, world_size: int) -> None:
    """Values and gradients are those of `plain`."""
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(param), expected, msg=name)
    check(model, plain, rank, world_size, step)


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
    """Behaviour 169: values are copied into the shards, also while unsharded; the next forward computes with them."""
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
    """Behaviour 169: `assign=True`, before and after the first forward; requires_grad and padding stay."""
    plain, model = sharded()
    model.inp.bias.requires_grad_(False)
    plain.inp.bias.requires_grad_(False)
    padded = [local(param.detach()).untyped_storage().nbytes() for param in model.parameters()]
    if when == "after":
        step(model, rank)
    whole, state = other_values(plain, model)
    model.load_state_dict(state, assign=True)
    plain.load_state_dict(whole)
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["inp.bias"]
    check_training(model, plain, rank, world_size)
    assert [local(param.detach()).untyped_storage().nbytes() for param in model.parameters()] == padded


@on_ranks(2)
def test_state_dict_of_a_child(rank: int, world_size: int) -> None:
    """Behaviour 167: a child's own state dict is sharded too, with the child's names."""
    plain, model = sharded(reshard_after_forward=False)
    model(batch(0, rank))
    state = model.blocks[0].state_dict()
    assert list(state) == list(plain.blocks[0].state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
