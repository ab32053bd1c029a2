"""The race detector itself. That it finds waits that are taken out is in `test_programs.py`."""

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.runtime.storage import FlatStorage
from tests.helpers.ranks import on_ranks
from tests.instruments.races.detector import Detector, FreedMemory, detecting
from tests.instruments.races.memory import ranges_of


def races_of(detector: Detector) -> list[str]:
    """How the races so far are told, which are then forgotten."""
    told = [race.told() for race in detector.report.races.values()]
    detector.report.races.clear()
    return told


@pytest.mark.parametrize("waits", [False, True])
def test_a_read_after_a_write_on_another_stream(waits: bool) -> None:
    with detecting() as detector:
        x = torch.zeros(4)
        with detector.streams.gathering():
            x.add_(1)
            event = detector.streams.record()
        if waits:
            event.wait()
        x * 2
        told = races_of(detector)
    # Nobody waited for `zeros`, which is on compute: the gather stream does not come after it.
    writes = [each for each in told if "write by add_" in each]
    assert len(writes) == 1 and "and zeros on stream 'compute'" in writes[0]
    reads = [each for each in told if "read by mul" in each]
    assert len(reads) == (not waits) and all("and add_ on stream 'gather'" in each for each in reads)


def test_memory_that_nobody_has_filled() -> None:
    """Of the library's own: what a program does with `torch.empty` is its affair."""
    storage = FlatStorage(64, torch.device("cpu"))
    with detecting() as detector:
        storage.alloc()
        x = storage.view(0, (8,), torch.float32)
        x[:4].zero_()
        x[:4].sum()
        assert races_of(detector) == []
        x.sum()
        assert "16 bytes are read that nobody has filled" in races_of(detector)[0]
        torch.empty(4).sum()
        assert races_of(detector) == []


def test_memory_that_was_freed() -> None:
    storage = FlatStorage(64, torch.device("cpu"))
    with detecting():
        storage.alloc()
        x = storage.view(0, (16,), torch.float32)
        x.zero_()
        storage.free()
        with pytest.raises(FreedMemory, match=r"sum on stream 'compute' uses memory that was freed"):
            x.sum()


def test_a_storage_that_moves_leaves_its_memory() -> None:
    """The next block at its address has a history of its own. (A resize to the size that a storage has moves it, which
    went unseen: later blocks at the old address had races with what was long over.)"""
    memory = np.ones(64, dtype=np.float32)
    with detecting() as detector:
        x = torch.from_numpy(memory)
        with detector.streams.gathering():
            x.add_(1)
            done = detector.streams.record()
        done.wait()
        x.share_memory_()  # puts it elsewhere, out of sight
        with detector.streams.reducing():
            torch.from_numpy(memory).add_(1)
        assert races_of(detector) == []
        storage = torch.ones(5000).untyped_storage()
        start = storage.data_ptr()
        storage.resize_(20000)
        assert storage.data_ptr() != start and detector._blocks[id(storage)].start != start


@on_ranks(2)
@pytest.mark.parametrize("waits", [False, True])
def test_collectives_of_dtensor_have_a_stream_of_their_own(rank: int, world_size: int, waits: bool) -> None:
    with detecting() as detector:
        x = torch.ones(4)
        result = torch.ops._c10d_functional.all_reduce_(x, "sum", dist.group.WORLD.group_name)
        if waits:
            torch.ops._c10d_functional.wait_tensor(result)
        x.add_(1)
        told = races_of(detector)
        assert len(told) == (not waits), told
        if not waits:
            torch.ops._c10d_functional.wait_tensor(result)


@on_ranks(2)
def test_two_threads_wait_for_one_message(rank: int, world_size: int) -> None:
    """A message of gloo ends one wait. A thread that frees memory once waited for what the program's had got: it never
    ended, and neither did what later tests gave it to free."""
    with detecting() as detector:
        x, group = torch.ones(4), dist.distributed_c10d._get_default_group()
        if rank == 0:
            time.sleep(0.5)  # both threads wait
            group.send([x], 1, 7).wait()
            return
        work = group.recv([x], 0, 7)
        threads = [threading.Thread(target=detector.finish_works, daemon=True) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert not any(each.is_alive() for each in threads)
        work.wait()


@on_ranks(2)
def test_a_report_names_operations_and_places(rank: int, world_size: int) -> None:
    def forward() -> str:
        with detecting() as detector:
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            fully_shard(model[0])
            fully_shard(model)
            wait, detector.streams.wait = detector.streams.wait, lambda event: None  # type: ignore[method-assign]
            model(torch.ones(2, 8))
            detector.streams.wait = wait  # type: ignore[method-assign]
        return ""

    with pytest.raises(AssertionError) as caught:
        forward()
    message = str(caught.value)
    assert "read by mm on stream 'compute'" in message or "read by t on" in message
    assert "_foreach_copy_ on stream 'gather'" in message
    assert "tests/instruments/races/test_detector.py" in message and "fsdp2/runtime/gather.py" in message


def test_addresses_of_strided_tensors() -> None:
    x = torch.zeros(4, 6)
    start = x.data_ptr()
    assert ranges_of(x) == ranges_of(x.t()) == [(start, start + 96)]
    assert ranges_of(x[1:3]) == [(start + 24, start + 72)]
    assert ranges_of(x[:, 2:4]) == [(start + 24 * row + 8, start + 24 * row + 16) for row in range(4)]
    assert ranges_of(x[:, 0]) == [(start + 24 * row, start + 24 * row + 4) for row in range(4)]
    assert ranges_of(x[0].expand(9, 6)) == [(start, start + 24)]
    assert ranges_of(torch.zeros(0)) == []
