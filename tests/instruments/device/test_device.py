"""The lagging device itself: who forgets to wait computes with wrong numbers, who waits does not; and its memory."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdp2._torch.extras import all_gather_flat, reduce_scatter_flat
from fsdp2.checkpoint.io.memory import new_buffer
from tests.instruments.device import lagging
from tests.instruments.device.ranks import DEVICE, SEEDS, late, on_device_ranks


def seeds_with(wrong: Callable[[], bool]) -> int:
    """In how many seeds `wrong` is true."""
    count = 0
    for seed in range(SEEDS):
        with late(seed):
            count += wrong()
    return count


def sum_made_on_another_stream(waits: bool) -> bool:
    """Make a tensor on a side stream and read it on the current one. Whether its sum is wrong."""
    side = torch.Stream(DEVICE)
    with side:
        ones = torch.ones(1000, device=DEVICE)
        for _ in range(3):
            ones = ones * 1
        made = side.record_event()
    if waits:
        made.wait()
    total = ones.sum()
    torch.accelerator.synchronize()
    return total.item() != 1000


@on_device_ranks(1)
def test_a_missing_wait_gives_wrong_numbers(rank: int, world_size: int) -> None:
    assert seeds_with(lambda: sum_made_on_another_stream(waits=False)) >= SEEDS // 3
    assert seeds_with(lambda: sum_made_on_another_stream(waits=True)) == 0


def sum_of_freed(keeps: bool) -> bool:
    """Read a tensor on a side stream, and free it on the host, at once or when the side stream has been waited for. Any
    allocation on the stream of the freed tensor may get its memory."""
    side = torch.Stream(DEVICE)
    ones = torch.ones(1000, device=DEVICE)
    made = torch.accelerator.current_stream().record_event()
    with side:
        made.wait()
        total = ones.sum()
        done = side.record_event()
    if keeps:
        done.wait()
    del ones
    torch.empty(1, device=DEVICE)
    torch.accelerator.synchronize()
    return total.item() != 1000


@on_device_ranks(1)
def test_freed_memory_is_poisoned(rank: int, world_size: int) -> None:
    assert seeds_with(lambda: sum_of_freed(keeps=False)) >= SEEDS // 5
    assert seeds_with(lambda: sum_of_freed(keeps=True)) == 0


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
def test_memory_is_counted(rank: int, world_size: int) -> None:
    """Bytes in multiples of 512, their peak, and blocks that are used again on their own stream only."""
    torch.accelerator.empty_cache()
    before = lagging.counts()
    first = torch.empty(1024, device=DEVICE)
    second = torch.empty(1, device=DEVICE)
    assert lagging.counts()["allocated"] - before["allocated"] == 4096 + 512
    del first
    assert lagging.counts()["allocated"] - before["allocated"] == 512
    assert lagging.counts()["peak"] >= before["allocated"] + 4608
    reserved, reused = lagging.counts()["reserved"], lagging.counts()["reused"]
    again = torch.empty(1024, device=DEVICE)
    assert (lagging.counts()["reserved"], lagging.counts()["reused"]) == (reserved, reused + 1)
    del again
    with torch.Stream(DEVICE):
        other = torch.empty(1024, device=DEVICE)
    assert (lagging.counts()["reserved"], lagging.counts()["reused"]) == (reserved + 4096, reused + 1)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == lagging.counts()["allocated"]
    del second, other


def pinned_copy(waits: bool) -> bool:
    """Copy to pinned memory without blocking. Whether the host read it too early."""
    source = torch.ones(1000, device=DEVICE)
    for _ in range(3):
        source = source * 1
    host = torch.empty(1000, pin_memory=True)
    assert host.is_pinned()
    host.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().record_event().synchronize()
    wrong = not torch.equal(host, torch.ones(1000))
    torch.accelerator.synchronize()
    return wrong


@on_device_ranks(1)
def test_copies_to_pinned_memory_do_not_block(rank: int, world_size: int) -> None:
    assert seeds_with(lambda: pinned_copy(waits=False)) >= SEEDS // 3
    assert seeds_with(lambda: pinned_copy(waits=True)) == 0


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
    with pytest.raises(RuntimeError, match="shape"):
        torch.ones(2, 3, device=DEVICE) @ torch.ones(2, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    torch.nn.functional.embedding(torch.tensor([7], device=DEVICE), torch.ones(2, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"earlier work: aten::index_select.*out of range"):
        torch.accelerator.synchronize()


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
