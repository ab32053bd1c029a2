"""The lagging device itself. That it shows a wait that is missing, and memory that is freed too early, is seen in
`test_mutants.py`; that it shows nothing else, in `test_training.py`."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.io.memory import new_buffer
from tests.instruments.device.ranks import DEVICE, SEEDS, late, on_device_ranks


def seeds_with(wrong: Callable[[], bool]) -> int:
    """In how many seeds `wrong` is true."""
    count = 0
    for seed in range(SEEDS):
        with late(seed):
            count += wrong()
    return count


@on_device_ranks(1)
def test_a_write_to_freed_memory_is_reported(rank: int, world_size: int) -> None:
    """By the next owner of the block, although it reads nothing of what was written."""

    def is_reported() -> bool:
        side = torch.Stream(DEVICE)
        ones = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize()
        with side:
            for _ in range(3):
                ones.fill_(2)
        del ones
        torch.empty(1, device=DEVICE)
        side.synchronize()
        again = torch.zeros(1000, device=DEVICE)
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            return "was written after it had been freed" in str(error)
        return bool(again.sum().item() != 0)

    assert seeds_with(is_reported) >= SEEDS // 5


@on_device_ranks(1)
def test_copies_from_pinned_memory_do_not_block(rank: int, world_size: int) -> None:
    """The host must not change the source too early. It may free it: the allocator waits, as that of CUDA does."""

    def is_wrong(changes: bool) -> bool:
        host = torch.ones(1000).pin_memory()
        device = host.to(DEVICE, non_blocking=True)
        if changes:
            host.zero_()
        del host
        others = torch.zeros(1000).pin_memory()
        return bool(device.sum().item() != 1000) and others is not None

    assert seeds_with(lambda: is_wrong(changes=True)) >= SEEDS // 5
    assert seeds_with(lambda: is_wrong(changes=False)) == 0


@on_device_ranks(1)
def test_copies_of_other_memory_block(rank: int, world_size: int) -> None:
    """That of checkpoints is pinned. (For an accelerator other than CUDA it was not, and each copy blocked.)"""
    assert new_buffer(10, torch.device(DEVICE)).is_pinned() and not new_buffer(10, torch.device("cpu")).is_pinned()
    for seed in range(SEEDS):
        with late(seed):
            host = torch.ones(1000)
            device = host.to(DEVICE, non_blocking=True)
            host.zero_()
            back = torch.empty(1000)
            back.copy_(device, non_blocking=True)
            assert back.sum() == 1000


@on_device_ranks(1)
def test_wrong_calls_are_errors(rank: int, world_size: int) -> None:
    """At once, where the host can know; else where it waits next."""
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    torch.nn.functional.embedding(torch.tensor([7], device=DEVICE), torch.ones(2, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"earlier work: aten::index_select.*out of range"):
        torch.accelerator.synchronize()


@on_device_ranks(2)
def test_messages(rank: int, world_size: int) -> None:
    """What no training here sends: all-to-all, broadcast, point to point; and a barrier, for which the host waits."""
    for seed in range(SEEDS):
        with late(seed):
            mine = torch.full((world_size,), float(rank), device=DEVICE)
            every, first = torch.empty_like(mine), mine.clone()
            works = dist.all_to_all_single(every, mine, async_op=True), dist.broadcast(first, 0, async_op=True)
            for work in works:
                work.wait()
            assert (every.tolist(), first.tolist()) == ([0.0, 1.0], [0.0, 0.0])
            if rank == 0:
                dist.send(mine, 1)
                dist.recv(mine, 1)
            else:
                dist.recv(every, 0)
                dist.send(every + 1, 0)
            dist.barrier()
            assert mine.tolist() == [1.0, 1.0]
