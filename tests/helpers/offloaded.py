"""Layers that are offloaded and their training; what holds back offloaded steps, and what shows them under way."""

import threading
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import Offload, offload_optimizer
from fsdp2._torch import local_of
from fsdp2.optim import local_optimizer
from fsdp2.optim.background import submit
from fsdp2.optim.pending import PendingTensor

__all__ = ["Gate", "layers", "optimizer_for", "pending", "step_late", "train", "trained"]


def layers(policy: Offload | None, dim: int = 8, depth: int = 8) -> Any:
    """Linear layers, each a unit."""
    torch.manual_seed(0)
    options = {} if policy is None else {"offload_policy": policy}
    model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(depth)))
    for layer in model:
        fsdp2.fully_shard(layer, **options)
    return fsdp2.fully_shard(model, **options)


def optimizer_for(params: Any, policy: Offload | None, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    """The same steps with offload and without."""
    make: Any = local_optimizer if policy is None else offload_optimizer
    return make(kind, params, **{"lr": 1e-2, **options})


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        fsdp2.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def trained(policy: Offload | None, rank: int, steps: int, dim: int = 8) -> tuple[Any, Any]:
    model = layers(policy, dim)
    optimizer = optimizer_for(model.parameters(), policy)
    train(model, optimizer, rank, range(steps))
    return model, optimizer


class Gate:
    """Holds back the background, so that what is not waited for is seen to be missing."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        submit(self._hold, None)

    def _hold(self) -> None:
        assert self.opens.wait(30)

    def open_soon(self) -> None:
        threading.Timer(0.05, self.opens.set).start()


def step_late(optimizer: Any) -> None:
    """The step returns, and the background begins with it a while later."""
    gate = Gate()
    optimizer.step()
    gate.open_soon()


def pending(model: nn.Module) -> list[str]:
    """The names of the parameters whose step is under way."""
    sharded = [(name, param) for name, param in model.named_parameters() if isinstance(param, DTensor)]
    return [name for name, param in sharded if isinstance(local_of(param), PendingTensor)]
