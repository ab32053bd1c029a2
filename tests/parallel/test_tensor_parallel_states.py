"""Tensor-parallel models outside of training: meta devices, conversion, state dicts, optimizer states, clipping."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close

import fsdp2
from tests.helpers.parity_models import full, local, mean_gradients, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    PLANS,
    TpLm,
    assert_tp_gradients,
    check_step,
    data_rank,
    dp_tp,
    hsdp_tp,
    placements_after,
    quiet,
    token_batch,
    tokens,
    tp_pair,
    tp_shard,
)

every_plan = pytest.mark.parametrize("plan", PLANS)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_meta_init(rank: int, world_size: int, plan: str, hsdp: bool) -> None:
    """Behaviour 31: meta, TP, fully_shard, to_empty, initialise, train."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain = TpLm()
    with torch.device("meta"):
        model: Any = TpLm()
    tp_shard(fsdp2, model, mesh, plan)
    assert all(isinstance(param, DTensor) and param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for (name, param), value in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.placements == (Replicate(),) * hsdp + placements_after(name, plan)
            local(param).copy_(shard_like(value, param))
    with quiet():
        check_step(model, plain, mesh)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("raf", [True, False])
def test_state_dict(rank: int, world_size: int, plan: str, raf: bool) -> None:
    """Behaviour 167, 169: DTensors under the plain names, also right after forward; loading them restores the
    values."""
    mesh = dp_tp()
    plain, model = tp_pair(plan=plan, reshard_after_forward=raf)
    with quiet():
        model(tokens(0, data_rank(mesh)))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert state[name].placements == placements_after(name, plan), name
        assert_close(state[name].full_tensor(), value)
    _, other = tp_pair(plan=plan)
    with torch.no_grad():
        for param in other.parameters():
            local(param).add_(1)
    assert other.load_state_dict(state) == model.load_state_dict(state)
    with quiet():
        check_step(other, plain, mesh)
        check_step(model, plain, mesh)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_full_state_dict(rank: int, world_size: int, plan: str, hsdp: bool) -> None:
    """Behaviour 170: torch's own helpers gather the full state dict on rank 0, and load it from there."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain, model = tp_pair(mesh, plan)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    assert sorted(whole) == (sorted(plain.state_dict()) if rank == 0 else [])
    for name, value in whole.items():
        assert torch.equal(value, plain.state_dict()[name]), name
    torch.manual_seed(1)
    _, other = tp_pair(mesh, plan)
    assert not torch.equal(full(other.embed.weight), plain.embed.weight)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with quiet():
        check_step(other, plain, mesh)


@on_ranks(4)
def test_optimizer_state(rank: int, world_size: int) -> None:
    """Behaviour 158, 170: Adam's moments lie as the parameters do, and torch's helper gathers them whole."""
    mesh = dp_tp()
    plain, model = tp_pair()
    optim = torch.optim.Adam(model.parameters())
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    optim.step()
    for param in model.parameters():
        moment = optim.state[param]["exp_avg"]
        assert (moment.device_mesh, moment.placements) == (param.device_mesh, param.placements)
    state = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        for name, grad in mean_gradients(plain, 2, lambda m, r: token_batch(m, 0, r)).items():
            assert grad is not None
            assert_close(state["state"][name]["exp_avg"], 0.1 * grad, rtol=1e-4, atol=1e-6)


@on_ranks(4)
@pytest.mark.parametrize(("norm_type", "hsdp"), [(2, False), (float("inf"), False), (2, True)])
def test_clip_grad_norm(rank: int, world_size: int, norm_type: float, hsdp: bool) -> None:
    """Behaviour 171: torch's own function gives the global norm as a DTensor, and clips to it (all parameters TP)."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain, model = tp_pair(mesh, "sequence")
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    for name, grad in mean_gradients(plain, 2, lambda m, r: token_batch(m, 0, r)).items():
        plain.get_parameter(name).grad = grad
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    assert isinstance(norm, DTensor)
    assert_close(norm.full_tensor(), expected, rtol=1e-4, atol=1e-6)
    assert_tp_gradients(model, {name: param.grad for name, param in plain.named_parameters()})
