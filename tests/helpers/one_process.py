"""A sharded copy of a plain model, and its gradients against those of one process that has the batches of all ranks."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp2 import fully_shard
from tests.helpers.models import run_step
from tests.helpers.parity_models import assert_gradients, mean_gradients

__all__ = ["check", "in_units"]


def in_units(plain: nn.Module, **options: Any) -> Any:
    """A copy of which the entries of `blocks` or `layers`, or else the children, are units, and then the root."""
    model: Any = copy.deepcopy(plain)
    for child in getattr(model, "blocks", None) or getattr(model, "layers", None) or model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def check(
    model: Any, plain: nn.Module, rank: int, world_size: int, backward: Callable[..., Any] = run_step, times: int = 1
) -> None:
    """`backward(model, rank)` gives, each time, the mean of the gradients that it gives on `plain` for each rank."""
    expected = mean_gradients(plain, world_size, backward)
    for _ in range(times):
        model.zero_grad()
        backward(model, rank)
        assert_gradients(model, expected)
