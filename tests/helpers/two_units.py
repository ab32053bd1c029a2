"""A model of two units, its loss, and what the tests of losses compare (`core/gradients/test_nothing_lost.py`)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp2 import ZeroPolicy, fully_shard
from tests.helpers.parity_models import batch, full

STAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "stage 2": {"zero": ZeroPolicy(stage=2)},
    "smaller": {"reshard_after_forward": 2},
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def shard(model: nn.Module, **options: Any) -> Any:
    fully_shard(model[0], **options)  # type: ignore[index]
    return fully_shard(model, **options)


def pair(**options: Any) -> tuple[nn.Module, Any]:
    plain = layers()
    return plain, shard(copy.deepcopy(plain), **options)


def loss(model: nn.Module, rank: int) -> Tensor:
    out: Tensor = model(batch(0, rank, 4))
    return out.square().sum()


def evaluate(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        return loss(model, rank)


def backward(model: nn.Module, rank: int) -> None:
    loss(model, rank).backward()


def assert_same_values(model: Any, plain: nn.Module) -> None:
    model.reshard()
    for (name, mine), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_close(full(mine), right, msg=name)
