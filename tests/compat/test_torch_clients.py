"""Code of torch that takes a sharded model for any module with DTensor parameters: checkpoint helpers, parametrizations
(Behaviour 4, 167-170)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.testing import assert_close

import fsdp2
from fsdp2 import fully_shard
from tests.helpers.parity_models import Stack, full, mesh_2d, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks

FULL = StateDictOptions(full_state_dict=True)
FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def trained(rank: int, api: Any = fsdp2, **options: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer after a step."""
    model = shard_blocks(api, Stack(depth=1), **options)
    optim = adam(model)
    one_batch(model, 0, rank)
    optim.step()
    optim.zero_grad()
    return model, optim


def fresh(api: Any = fsdp2, **options: Any) -> tuple[Any, Any]:
    """Another model with other values, and its optimizer without state."""
    torch.manual_seed(99)
    model = shard_blocks(api, Stack(depth=1), **options)
    return model, adam(model)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, DTensors made whole."""
    if not isinstance(value, dict):
        return {prefix: full(value)}
    return {name: leaf for key, item in value.items() for name, leaf in flat(item, f"{prefix}/{key}").items()}


def assert_equal_states(actual: Any, expected: Any) -> None:
    """The same whole values under the same names."""
    left, right = flat(actual), flat(expected)
    assert left.keys() == right.keys()
    for name, value in left.items():
        same = torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name]
        assert same, name


def assert_trains_alike(rank: int, *pairs: tuple[Any, Any]) -> None:
    """The next step changes all models in the same way."""
    for model, optim in pairs:
        one_batch(model, 7, rank)
        optim.step()
        optim.zero_grad()
    for model, _ in pairs[1:]:
        for (name, param), other in zip(model.named_parameters(), pairs[0][0].parameters(), strict=True):
            assert_close(full(param), full(other), rtol=1e-5, atol=1e-7, msg=name)


LAYOUTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp": lambda _size: {},
    "kept": lambda _size: {"reshard_after_forward": False},
    "hsdp": lambda size: {"mesh": mesh_2d(2, size // 2)},
}

# --- torch.distributed.checkpoint.state_dict --------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("layout", ["hsdp", "fsdp"])
@pytest.mark.parametrize("how", ["full", "full_cpu", "broadcast"])
def test_full_state_dicts(rank: int, world_size: int, how: str, layout: str) -> None:
    """Behaviour 170: whole states, on every rank or on rank 0 alone, into another model."""
    options = LAYOUTS[layout](world_size)
    model, optim = trained(rank, **options)
    wanted = {"full": FULL, "full_cpu": FULL_CPU, "broadcast": FULL_CPU}[how]
    state = copy.deepcopy(get_model_state_dict(model, options=wanted))
    optim_state = copy.deepcopy(get_optimizer_state_dict(model, optim, options=wanted))
    if how == "full" or rank == 0:
        assert not any(isinstance(value, DTensor) for value in flat(state).values())
        assert state["inp.weight"].shape == (8, 8)
    else:
        assert not state  # with cpu_offload rank 0 alone has them
    other, other_optim = fresh(**options)
    if how == "full_cpu":
        lists = [state, optim_state]
        dist.broadcast_object_list(lists)
        state, optim_state = lists
    wanted = BROADCAST if how == "broadcast" else FULL
    set_model_state_dict(other, state, options=wanted)
    set_optimizer_state_dict(other, other_optim, optim_state, options=wanted)
    assert_trains_alike(rank, (model, optim), (other, other_optim))


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def save(path: Path, model: Any, optim: Any) -> None:
    state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=path)


def load(path: Path, model: Any, optim: Any) -> None:
    state, optim_state = get_state_dict(model, optim)
    states = {"model": state, "optim": optim_state}
    dcp.load(states, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=states["model"], optim_state_dict=states["optim"])


@on_ranks(4)
@pytest.mark.parametrize(("first", "second"), [("fsdp", "hsdp"), ("hsdp", "kept"), ("kept", "fsdp")])
def test_checkpoint_into_another_layout(rank: int, world_size: int, tmp_path: Path, first: str, second: str) -> None:
    """Behaviour 167: `dcp.save` of one layout and `dcp.load` into another: training goes on."""
    model, optim = trained(rank, **LAYOUTS[first](world_size))
    save(tmp_path / "checkpoint", model, optim)
    other, other_optim = fresh(**LAYOUTS[second](world_size))
    load(tmp_path / "checkpoint", other, other_optim)
    assert_equal_states(get_optimizer_state_dict(other, other_optim), get_optimizer_state_dict(model, optim))
    assert_trains_alike(rank, (model, optim), (other, other_optim))


@on_ranks(2)
@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_checkpoint_of_torchs_fsdp2(rank: int, world_size: int, tmp_path: Path, direction: str) -> None:
    """Migration: checkpoints of torch's FSDP2 are ours, and the reverse, optimizer states included."""
    apis = (torch_fsdp, fsdp2) if direction == "from_torch" else (fsdp2, torch_fsdp)
    model, optim = trained(rank, api=apis[0])
    save(tmp_path / "checkpoint", model, optim)
    other, other_optim = fresh(api=apis[1])
    load(tmp_path / "checkpoint", other, other_optim)
    assert_trains_alike(rank, (model, optim), (other, other_optim))


# --- parametrizations -------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", [weight_norm, spectral_norm])
def test_parametrizations(rank: int, world_size: int, kind: Callable[[nn.Module], nn.Module]) -> None:
    """Behaviour 4: a parametrized layer is a unit: what it computes its weight from is sharded, and gathered for
    that."""
    torch.manual_seed(0)
    plain = nn.Sequential(kind(nn.Linear(8, 6)), nn.Tanh(), kind(nn.Linear(6, 3)))
    model: Any = copy.deepcopy(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    optim = adam(model)
    plain_optim = adam(plain)
    for step in range(2):
        loss = one_batch(model, step, 0)
        assert_close(loss, one_batch(plain, step, 0))
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == expected[0]
        assert_close(full(param), expected[1], rtol=1e-4, atol=1e-6, msg=name)
