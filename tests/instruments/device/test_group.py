"""Collectives of the lagging device: they wait for the current stream, run beside it, and the current stream waits for
them, not the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdp2._torch.extras import all_gather_flat, reduce_scatter_flat
from tests.instruments.device.ranks import DEVICE, SEEDS, late, on_device_ranks

SUM = dist.ReduceOp.SUM
Issued = tuple[torch.Tensor, dist.Work, torch.Tensor]  # the result, its handle, what is expected


def ranks_row(size: int, factor: float = 1.0) -> torch.Tensor:
    return torch.arange(size * 3, dtype=torch.float32, device=DEVICE) * factor


def all_gather(rank: int, size: int) -> Issued:
    output = torch.empty(3 * size, device=DEVICE)
    work = all_gather_flat(output, torch.full((3,), float(rank), device=DEVICE), dist.group.WORLD)
    return output, work, torch.arange(size, dtype=torch.float32).repeat_interleave(3)


def reduce_scatter(rank: int, size: int) -> Issued:
    output = torch.empty(3, device=DEVICE)
    work = reduce_scatter_flat(output, ranks_row(size, rank + 1.0), SUM, dist.group.WORLD)
    return output, work, torch.arange(3 * size).view(size, 3)[rank] * size * (size + 1) / 2


def all_reduce(rank: int, size: int) -> Issued:
    tensor = ranks_row(1, rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    return tensor, work, torch.arange(3) * size * (size + 1) / 2


def all_to_all(rank: int, size: int) -> Issued:
    output = torch.empty(size, device=DEVICE)
    work = dist.all_to_all_single(output, torch.full((size,), float(rank), device=DEVICE), async_op=True)
    return output, work, torch.arange(size, dtype=torch.float32)


def broadcast(rank: int, size: int) -> Issued:
    tensor = torch.full((3,), float(rank), device=DEVICE)
    return tensor, dist.broadcast(tensor, 0, async_op=True), torch.zeros(3)


@on_device_ranks(2, 4)
@pytest.mark.parametrize("collective", [all_to_all, broadcast], ids=lambda each: each.__name__)
def test_results(rank: int, world_size: int, collective: Callable[..., Issued]) -> None:
    """Of those that no training here has: whatever is late, the current stream has the result after `wait`."""
    for seed in range(SEEDS):
        with late(seed):
            output, work, expected = collective(rank, world_size)
            work.wait()
            doubled = output * 2
            del output, work
            assert torch.equal(doubled.cpu(), expected.float() * 2)


@on_device_ranks(2)
@pytest.mark.parametrize("collective", [all_gather, reduce_scatter, all_reduce], ids=lambda each: each.__name__)
def test_a_missing_wait_is_seen(rank: int, world_size: int, collective: Callable[..., Issued]) -> None:
    wrong = 0
    for seed in range(SEEDS):
        with late(seed):
            output, work, expected = collective(rank, world_size)
            doubled = output * 2
            work.wait()
            wrong += not torch.equal(doubled.cpu(), expected.float() * 2)
    assert wrong >= SEEDS // 3


@on_device_ranks(2)
def test_messages(rank: int, world_size: int) -> None:
    """Point to point; and a barrier, for which the host waits."""
    for seed in range(SEEDS):
        with late(seed):
            tensor = torch.full((3,), float(rank), device=DEVICE)
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                received = torch.empty(3, device=DEVICE)
                dist.recv(received, 0)
                dist.send(received + 1, 0)
            dist.barrier()
            assert tensor.tolist() == [1.0, 1.0, 1.0]
