"""What the scenarios share."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.parity_models import batch
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.device.training import Feature

__all__ = ["ADAM", "Scenario", "as_on_cpu", "assert_same", "inputs", "one_step", "shared_folder", "stream_of", "values"]

Scenario = Callable[[int, int, int], None]  # of a rank: its number, how many there are, the seed
ADAM = Feature(optimizer=torch.optim.AdamW)


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """A new folder that all ranks know."""
    made = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(made, 0, device=torch.device("cpu"))
    yield Path(made[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(made[0])


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local().detach().cpu() for param in model.parameters()]  # type: ignore[attr-defined]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def inputs(rank: int, device: str) -> list[torch.Tensor]:
    """Of two steps, already on the device, so that the steps do not wait for it."""
    return [batch(step, rank, 16).to(device) for step in range(2)]


def stream_of(seed: int) -> torch.Stream:
    """The program's own current stream: in every second seed not the default one, which other threads have."""
    return torch.Stream(DEVICE) if seed % 2 else torch.accelerator.current_stream()


def as_on_cpu(trained: Callable[[str, int, int, int], list[torch.Tensor]], max_us: int = 300) -> Scenario:
    """`trained(device, rank, world_size, seed)` gives on the late device what it gives on the CPU."""

    def scenario(rank: int, world_size: int, seed: int) -> None:
        expected = trained("cpu", rank, world_size, seed)
        with late(seed, max_us):
            assert_same(trained(DEVICE, rank, world_size, seed), expected)

    return scenario


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)
