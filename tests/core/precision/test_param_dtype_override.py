"""A compute dtype for each parameter (Behaviour 122, 123), which torch 2.15 added."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp2
from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import linears, reference_grads, run_step
from tests.helpers.parity_models import (
    assert_gradients,
    batch,
    count,
    full,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


class Normed(nn.Module):
    """A norm, which is to stay in fp32, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("keep", [torch.float32, None, torch.bfloat16])
def test_param_dtype_override(rank: int, world_size: int, keep: torch.dtype | None) -> None:
    """Behaviour 122: called once for each parameter, in `fully_shard`; the original dtype keeps it from being cast."""
    model: Any = Normed()
    norms, everything = set(model.norm.parameters()), list(model.parameters())
    asked: list[Tensor] = []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return keep if param in norms else None

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=override)
    fully_shard(model, mp_policy=policy)
    assert len(asked) == len(everything) and {id(param) for param in asked} == {id(param) for param in everything}
    seen: list[torch.dtype] = []
    model.norm.register_forward_hook(lambda *_: seen.extend(param.dtype for param in model.parameters()))
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with events.record() as log:
        loss = model(batch(0, rank, 4)).sum()
    loss.backward()
    kept = keep or torch.bfloat16
    assert seen == [torch.bfloat16, kept, kept, torch.bfloat16, torch.bfloat16], "inputs are cast all the same"
    assert count(log, "all_gather") == {"all_gather": 1}
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    assert_close(full(model.linear.bias.grad), torch.full((4,), 3.0))
    assert len(asked) == len(everything)


@on_ranks(2)
def test_param_dtype_override_trains(rank: int, world_size: int) -> None:
    """Behaviour 122: everything uncast is training without a policy, but for the inputs."""
    plain = linears(2)
    policy = MixedPrecisionPolicy(
        torch.bfloat16, cast_forward_inputs=False, param_dtype_override_fn=lambda param: param.dtype
    )
    model = shard_blocks(fsdp2, copy.deepcopy(plain), mp_policy=policy)
    for step in range(2):
        model.zero_grad()
        run_step(model, rank, step)
        assert_gradients(model, reference_grads(plain, world_size, step))


@on_ranks(2)
def test_param_dtype_override_of_managed_parameters(rank: int, world_size: int) -> None:
    """Behaviour 122: not called for ignored parameters, nor for those of units below, and once for a tied one."""
    model: Any = linears(3)
    model[2].weight = model[1].weight
    fully_shard(model[0])
    asked: list[Tensor] = []
    managed = [model[1].weight, model[1].bias]
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=asked.append)
    fully_shard(model, mp_policy=policy, ignored_params={model[2].bias})
    assert [id(param) for param in asked] == [id(param) for param in managed]


@on_ranks(2)
@pytest.mark.parametrize("value", [torch.float16, torch.int32, "float32", 1])
def test_param_dtype_override_values(rank: int, world_size: int, value: Any) -> None:
    """Behaviour 122: param_dtype, the original dtype, or None; the error names parameter and value."""
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: value)
    with pytest.raises(ValueError, match=r"0\.weight") as info:
        fully_shard(linears(1), mp_policy=policy)
    assert str(value) in str(info.value)


def test_param_dtype_override_is_keyword_only() -> None:
    """Behaviour 122: not the fifth positional argument."""
    with pytest.raises(TypeError):
        MixedPrecisionPolicy(torch.bfloat16, None, None, True, lambda param: None)  # type: ignore[misc]
    assert MixedPrecisionPolicy().param_dtype_override_fn is None
