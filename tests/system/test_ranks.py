"""The harness itself: failures, deaths and hangs are reported with their rank, and never reach the next test."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RanksFailed, on_ranks, run_on_ranks
from tests.helpers.ranks_worker import KEPT_GROUPS
from tests.helpers.threads import run_threads


@on_ranks(2, 4)
@pytest.mark.parametrize("offset", [0, 10])
def test_ranks_communicate(rank: int, world_size: int, offset: int) -> None:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    assert value.item() == sum(range(world_size)) + offset * world_size
    assert dist.get_world_size() == world_size and dist.get_rank() == rank
    assert torch.get_num_threads() == 1


def patch_linear(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_patched = hasattr(torch.nn.Linear, "patched")
    monkeypatch.setattr(torch.nn.Linear, "patched", True, raising=False)
    return is_patched


def test_patches_of_a_body_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture is a copy in the workers. An optimizer that one test broke failed in another, a hundred tests
    later."""
    for _ in range(2):
        assert run_on_ranks(patch_linear, 2, monkeypatch=monkeypatch) == [False, False]


def make_groups(rank: int, world_size: int, count: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(count):
        dist.new_group([*range(world_size)])
    return before


def test_groups_of_finished_bodies_are_destroyed() -> None:
    run_on_ranks(make_groups, 2, count=KEPT_GROUPS + 1)
    assert run_on_ranks(make_groups, 2, count=1) == [1, 1]


def pid_of(rank: int, world_size: int, factor: int = 1) -> tuple[int, int]:
    return rank * factor, os.getpid()


def fail_on_last(rank: int, world_size: int) -> None:
    here, there = rank, world_size - 1
    assert here != there, "the last one"
    dist.barrier()


def hang_on_first(rank: int, world_size: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def die_on_first(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def skip_everywhere(rank: int, world_size: int) -> None:
    pytest.skip("not today")


def test_failing_rank_is_named_with_its_traceback() -> None:
    before = run_on_ranks(pid_of, 3)
    with pytest.raises(RanksFailed) as info:
        run_on_ranks(fail_on_last, 3)
    message = str(info.value)
    assert "--- rank 2 of 3 failed:" in message and "AssertionError: the last one" in message
    assert "assert 2 != 2" in message, "assertion rewriting"
    assert "still runs on ranks 0, 1 of 3" in message and "in fail_on_last" in message
    assert run_on_ranks(pid_of, 3) != before, "a new pool after a failure"


def test_hang_is_reported_with_stacks_and_the_next_body_runs() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)hang_on_first still runs on ranks 0 of 2 after 2 s.*in hang_on_first"):
        run_on_ranks(hang_on_first, 2, timeout_s=2)
    assert time.monotonic() - began < 20
    assert len(run_on_ranks(pid_of, 2)) == 2


def test_dead_process_is_reported() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 of 2 failed:\nthe process died: SIGKILL"):
        run_on_ranks(die_on_first, 2)


def test_skip_in_the_body_skips() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_on_ranks(skip_everywhere, 2)


def test_run_threads_reports_the_failing_rank() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 3:
            raise KeyError("three")
        dist.barrier()

    with pytest.raises(RuntimeError, match="rank 3 of 4 threads failed: KeyError"):
        run_threads(4, body)
    assert run_threads(2, lambda rank, world_size: rank) == [0, 1]
