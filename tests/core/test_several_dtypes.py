"""Trainable parameters of several dtypes in one unit (Behaviour 119, 120), which torch's FSDP2 refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from tests.helpers.parity_models import batch
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


@on_ranks(2, 4)
def test_mixed_dtypes_under_a_policy(rank: int, world_size: int) -> None:
    """Behaviour 113, 114, 120: param_dtype and reduce_dtype hold for all; the sharded side keeps its dtypes."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fsdp2.fully_shard(Experts(torch.float32, torch.bfloat16), mp_policy=policy)
    seen: set[torch.dtype] = set()
    model.router.register_forward_hook(lambda *_: seen.update(param.dtype for param in model.parameters()))
    model(batch(0, rank)).sum().backward()
    assert seen == {torch.bfloat16}
    assert [param.grad.dtype for param in model.parameters()] == [param.dtype for param in model.parameters()]
    assert {param.dtype for param in model.parameters()} == {torch.float32, torch.bfloat16}


@on_ranks(2)
def test_torch_and_mixed_dtypes(rank: int, world_size: int) -> None:
    """Behaviour 120: torch refuses at the first forward."""
    model = torch_fsdp.fully_shard(Experts(torch.float32, torch.bfloat16))
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(batch(0, rank))
