"""Tensor-parallel models outside of training: meta devices and state dicts."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close

import fsdp2
from tests.helpers.parity_models import local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    PLANS,
    TpLm,
    check_step,
    data_rank,
    dp_tp,
    hsdp_tp,
    placements_after,
    quiet,
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
