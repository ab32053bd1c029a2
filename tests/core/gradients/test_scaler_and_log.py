"""Loss scaling over shards, and the log (Behaviour 172, 174)."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fsdp2
from tests.helpers.parity_models import (
    Layers,
    Stack,
    batch,
    local,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import TpLm, dp_tp, tokens, tp_shard


def step(model: nn.Module, rank: int) -> None:
    model(batch(0, rank)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_grad_scaler(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 172: an inf in one shard makes all ranks skip the step and back off; the step after is taken."""
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    num_shards = world_size // 2 if hsdp else world_size
    model: Any = shard_blocks(fsdp2, Stack(depth=1), mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for poisoned in (True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optim.zero_grad()
        scaler.scale(model(batch(0, rank)).square().sum()).backward()
        if poisoned and rank % num_shards == num_shards - 1:  # the last shard, on every replica
            local(model.inp.weight.grad).fill_(float("inf"))
        scaler.step(optim)
        scaler.update()
        changed = [not torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(changed) == (not poisoned)
        assert scaler.get_scale() == 2.0


class ScaleFirst(nn.Module):
    """As CLIP: a scalar, which every rank has whole, before all that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@on_ranks(2, 4)
@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled first", "step alone"])
def test_sharded_grad_scaler(rank: int, world_size: int, unscales: bool) -> None:
    """Behaviour 172: `GradScaler` asks the ranks over which the first gradient is sharded: none for a scalar, and not
    those of the tensor axis for what tensor parallelism leaves whole. torch's scaler for FSDP1 asks all."""
    if world_size == 2:
        model: Any = fsdp2.fully_shard(ScaleFirst())
        poisoned, given = model.linear.weight, batch(0, rank, 4)
    else:
        model = tp_shard(fsdp2, TpLm(), dp_tp())
        poisoned, given = model.blocks[0].up.weight, tokens(0, rank // 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for is_poisoned in (True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optim.zero_grad()
        scaler.scale(model(given).square().sum()).backward()
        if is_poisoned and rank == world_size - 1:
            local(poisoned.grad).fill_(float("inf"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of one element that is taken for a scalar
            if unscales:
                scaler.unscale_(optim)
            scaler.step(optim)
        scaler.update()
        changed = [not torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(changed) == (not is_poisoned)
        assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_log(rank: int, world_size: int) -> None:
    """Behaviour 174: at DEBUG level the logger "fsdp2" tells what happens, with the units' names."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("fsdp2"), Keep()
    model = shard_blocks(fsdp2, Layers(1))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        model(batch(0, rank, 4)).sum().backward()
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    for kind in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        assert any(message.startswith(f"{kind} layers.0") for message in messages), kind
    assert any(message.startswith("root_pre_forward") for message in messages)
    assert any(message.startswith("root_post_backward") for message in messages)
    messages.clear()
    model(batch(0, rank, 4))
    assert messages == []
