"""By what the sum of gradients is divided, as seen in the gradients (Behaviour 124-131);
`tests/pure/test_scaling.py` has the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import Dot
from tests.helpers.parity_models import count, local, mesh_2d
from tests.helpers.ranks import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def reduced(model: Any, value: float) -> float:
    """This rank's gradient is `value`; what the reduction makes of all ranks'."""
    model.zero_grad()
    model(value).backward()
    return local(model.weights[0].grad).flatten()[0].item()


def dot(mesh: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    return fully_shard(Dot(size=8), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_mean_over_all_ranks(rank: int, world_size: int, dtype: torch.dtype, hsdp: bool) -> None:
    """Behaviour 124, 125: the mean over shards and replicas, in every reduce dtype."""
    model = dot(mesh_2d(2, world_size // 2) if hsdp else None, dtype)
    assert reduced(model, 2.0**rank) == sum(2.0**r for r in range(world_size)) / world_size


@on_ranks(4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("force_sum", [False, True])
def test_fp16_neither_overflows_nor_underflows(rank: int, world_size: int, hsdp: bool, force_sum: bool) -> None:
    """Behaviour 126, 130: half the division before, half after: 4 x 30000 does not overflow, 2^-23 does not vanish."""
    model = dot(mesh_2d(2, 2) if hsdp else None, torch.float16)
    model.set_force_sum_reduction_for_comms(force_sum)
    assert reduced(model, 30000) == 30000
    assert reduced(model, 2.0**-23) == 2.0**-23


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_custom_factor(rank: int, world_size: int, dtype: torch.dtype, hsdp: bool) -> None:
    """Behaviour 126, 128, 129: the sum over all ranks divided by the factor; 1 is the plain sum."""
    model = dot(mesh_2d(2, world_size // 2) if hsdp else None, dtype)
    for factor in (1, 2, 8, 0.5, float(world_size)):
        model.set_gradient_divide_factor(factor)
        assert reduced(model, 3.0) == 3 * world_size / factor
    model.set_reduce_scatter_divide_factor(1.0)
    assert reduced(model, 3.0) == 3 * world_size


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_force_sum(rank: int, world_size: int, dtype: torch.dtype, hsdp: bool) -> None:
    """Behaviour 130: SUM and a division of our own give the same mean, and the same with a factor."""
    model = dot(mesh_2d(2, world_size // 2) if hsdp else None, dtype)
    model.set_force_sum_reduction_for_comms(True)
    assert reduced(model, 2.0**rank) == sum(2.0**r for r in range(world_size)) / world_size
    model.set_gradient_divide_factor(0.5)
    assert reduced(model, 3.0) == 6 * world_size
    model.set_force_sum_reduction_for_comms(False)
    assert reduced(model, 3.0) == 6 * world_size


@on_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Behaviour 131: no communication; divided once, and only by a factor that was set. Tiny gradients survive."""
    model = dot(mesh_2d(2, 1)["shard"], dtype)
    with events.record() as log:
        assert reduced(model, 2.0**-24) == 2.0**-24
    assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 0, "all_reduce": 0}
    for factor, expected in ((1, 3.0), (2, 1.5), (0.5, 6.0)):
        model.set_gradient_divide_factor(factor)
        assert reduced(model, 3.0) == expected


@on_ranks(4)
@pytest.mark.parametrize("replicas", [1, 4])
def test_one_rank_axis_of_hsdp(rank: int, world_size: int, replicas: int) -> None:
    """Behaviour 109, 124, 131: an axis of size one divides nothing twice."""
    model = dot(mesh_2d(replicas, 4 // replicas))
    assert reduced(model, 2.0**rank) == 15 / 4
    model.set_gradient_divide_factor(3)
    assert reduced(model, 2.0**rank) == 5


@on_ranks(2)
def test_padding_of_an_uneven_direct_gradient_was_uninitialised(rank: int, world_size: int) -> None:
    """The all-reduce hook sees the flat gradients, padding included. On the direct lane nothing ever wrote the padding,
    so a hook that took a norm got garbage."""
    model = nn.Linear(1000, 301, bias=False)  # large enough for the direct lane, rows 151 and 150
    fully_shard(model)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    for _ in range(3):
        model(torch.randn(2, 1000)).sum().backward()
    for flat in seen:
        assert flat.numel() == 151 * 1000
        local = model.weight.grad.to_local().numel()
        assert flat[local:].abs().sum() == 0


class SharesMemory(nn.Module):
    """The gradient of `shift` is a view of the gradient that flows on to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift.view(-1) + x


@on_ranks(2)
def test_scaling_a_gradient_changed_another_one(rank: int, world_size: int) -> None:
    """fp16 gradients are divided before they are summed. That was done in place, but what autograd leaves in `.grad`
    may share its memory with the gradient that is still on its way to the input: the input's came out divided too."""
    model = SharesMemory().half()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    x = torch.ones(64, dtype=torch.float16, requires_grad=True)
    weight = torch.arange(64).half()
    (model(x * 1) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(model.shift.grad.full_tensor().view(-1), weight)
