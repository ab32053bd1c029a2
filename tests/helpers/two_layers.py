"""A net of two layers that are units, its step, and the comparison of its gradients with those of a plain one."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from fsdp2 import fully_shard
from tests.helpers.parity_models import full

X = torch.ones(2, 8)


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def sharded_layers(**options: Any) -> Any:
    model = two_layers()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def backward_of(model: nn.Module, value: torch.Tensor = X) -> None:
    model(value).square().mean().backward()


def train(model: nn.Module, x: torch.Tensor = X, steps: int = 3, evaluates: bool = False, make: Any = None) -> None:
    """Steps, of which each may evaluate between backward and step; and one more backward."""
    optimizer = make(model.parameters()) if make else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        backward_of(model, x)
        if evaluates:
            with torch.no_grad():
                model(x)
        optimizer.step()
        optimizer.zero_grad()
    backward_of(model, x)


def zero_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            assert isinstance(param, DTensor), "the module holds what the optimizer holds"
            param.zero_()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, name
        assert_close(full(param.grad), wanted.grad)
