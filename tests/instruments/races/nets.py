"""What the programs for the detector share: a small net, sharded and trained."""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from fsdp2.extras.comm_memory import FlatAllGather, FlatReduceScatter
from tests.instruments.races.detector import Detector

__all__ = ["Look", "batch", "customise", "net", "results", "sharded", "step"]

Look = Detector | None  # None: nobody looks


def net(num: int = 3) -> nn.Sequential:
    """Weights take the direct lane, biases the packed one."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32)) for _ in range(num)])


def sharded(model: nn.Sequential, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def step(model: Any, rank: int, number: int) -> None:
    model(batch(rank, number)).square().mean().backward()


def results(model: nn.Module) -> list[Tensor]:
    return [param.to_local().clone() for param in model.parameters()]  # type: ignore[operator]


class OfTorch:
    """Memory for custom collectives."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)


def customise(model: Any) -> None:
    """Let the units use collectives of the user's."""
    for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
        unit.set_custom_all_gather(FlatAllGather(OfTorch()))
        unit.set_custom_reduce_scatter(FlatReduceScatter(OfTorch()))
