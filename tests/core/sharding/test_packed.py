"""Frozen parameters of integers and of bytes that hold several small numbers, which torch's FSDP2 breaks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    Packed,
    PackedLinear,
)
from tests.helpers.trained_alike import SETTINGS, one_step, options, shard_children, train


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("setting", "storage"),
    [
        *((setting, torch.uint8) for setting in SETTINGS),
        *(("int", d) for d in (torch.int32, torch.bfloat16, torch.float32)),
    ],
)
def test_packed(rank: int, world_size: int, setting: str, storage: torch.dtype) -> None:
    """Forward finds class, attribute and every bit of the packed weight, trains what is beside it."""

    def build() -> nn.Module:
        return nn.Sequential(PackedLinear(storage), PackedLinear(storage))

    given = options(setting, world_size)
    plain = build()
    model = train(rank, world_size, lambda: copy.deepcopy(plain), lambda api, m: shard_children(api, m, **given))
    for layer, plain_layer in zip(model, plain, strict=True):
        assert isinstance(layer.weight, DTensor) and layer.weight.dtype == storage
        assert not layer.weight.requires_grad and layer.weight.grad is None
        for _ in range(2):
            layer.unshard()
            assert type(layer.weight) is Packed
            assert layer.weight.quant_state is plain_layer.weight.quant_state
            assert torch.equal(layer.weight.view(torch.uint8), plain_layer.weight.view(torch.uint8))
            assert not layer.weight.requires_grad
            layer.reshard()


@on_ranks(2, 4)
def test_every_bit_pattern_of_a_frozen_float(rank: int, world_size: int) -> None:
    """Packed bits may be NaNs of any kind; gathered beside a parameter of another dtype, all survive."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    model: Any = nn.Linear(8, 8)
    model.bits = nn.Parameter(bits.view(torch.bfloat16).clone(), requires_grad=False)
    fsdp2.fully_shard(model)
    model.unshard()
    assert torch.equal(model.bits.view(torch.int16), bits)
    model.reshard()
    assert torch.equal(full(model.bits).view(torch.int16), bits)


class Table(nn.Module):
    """Frozen integers of several dtypes and sizes beside a layer that trains."""

    def __init__(self, *more: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        values = torch.tensor([0, 1, 127, 3, 100])
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, *more):
            self.register_parameter(str(dtype)[6:], nn.Parameter(values.to(dtype), requires_grad=False))
        self.large = nn.Parameter(torch.tensor([[2**62 + 1], [-(2**63)], [2**63 - 1]]), requires_grad=False)
        self.offset = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.large.flatten().tolist() == [2**62 + 1, -(2**63), 2**63 - 1]
        assert self.uint8.dtype == torch.uint8 and self.offset.item() == 3
        total = sum(getattr(self, name).sum().to(x.dtype) for name in ("uint8", "int8", "int32", "int64"))
        return torch.tanh(self.linear(x)) * (total + self.offset).to(x.dtype) / 1000


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_integers(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 16, 119: of several sizes, and a 0-dim one; also where a unit has nothing else."""
    given = options(setting, world_size)

    def shard(api: Any, model: Any) -> None:
        api.fully_shard(model[0].linear, **given)
        shard_children(api, model, **given)

    model = train(rank, world_size, lambda: nn.Sequential(Table(), Table()), shard)
    for name, param in Table().named_parameters():
        assert model[0].get_parameter(name).dtype == param.dtype
        if not param.is_floating_point():
            assert torch.equal(full(model[0].get_parameter(name)), param)


@on_ranks(2, 4)
def test_rare_integers(rank: int, world_size: int) -> None:
    """Behaviour 119: dtypes of which gloo's own collectives know nothing: bytes are bytes."""
    rare = (torch.int16, torch.bool, torch.uint16, torch.uint32, torch.uint64)
    model: Any = fsdp2.fully_shard(Table(*rare))
    one_step(model, 0, rank)
    model.unshard()
    for name, param in Table(*rare).named_parameters():
        assert model.get_parameter(name).dtype == param.dtype
        assert param.is_floating_point() or torch.equal(model.get_parameter(name), param)


@on_ranks(2)
def test_a_unit_of_empty_parameters(rank: int, world_size: int) -> None:
    """Its gather has nothing to copy out of the packed buffer."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.sum()

    model = nn.Sequential(nn.Linear(4, 4), Empty())
    fsdp2.fully_shard(model[1])
    fsdp2.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
