"""Trainable parameters of several dtypes in one unit (Behaviour 119, 120), which torch's FSDP2 refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    Experts,
)
from tests.helpers.trained_alike import SETTINGS, one_step, options, shard_children, train


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_dtypes(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 120: each parameter is kept, computed with, and gets its gradient in its own dtype."""

    def build() -> nn.Module:
        return nn.Sequential(*[Experts(torch.float64, torch.float32) for _ in range(2)])

    model = train(rank, world_size, build, lambda api, m: shard_children(api, m, **options(setting, world_size)))
    one_step(model, 0, rank)
    dtypes = {param.dtype for param in model[0].parameters()}
    assert dtypes == {torch.float64, torch.float32}
    assert all(param.grad.dtype == param.dtype for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_fp32_router_beside_bf16_experts(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 120, 121: the same for the usual pair; bf16 sums are only so exact."""

    def build() -> nn.Module:
        return nn.Sequential(*[Experts(torch.float32, torch.bfloat16) for _ in range(2)])

    train(
        rank,
        world_size,
        build,
        lambda api, m: shard_children(api, m, **options(setting, world_size)),
        by_norm=True,
        rtol=4e-2,
        atol=1e-2,
        optim=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
