"""How ranks agree on a save: which save of one rank belongs to which of another, threads that cannot be started, a last
rank that dies while it completes the checkpoint."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import checkpoint
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.run import committing
from fsdp2.errors import CheckpointError
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.ranks import on_ranks

WIDTH = 8


def sharded(world_size: int, value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {"w": distribute_tensor(torch.full((WIDTH,), value), mesh, [Shard(0)], src_data_rank=None)}


def train(state: dict[str, Any], value: float) -> None:
    """Steps of all ranks together, up to the one after which all values are `value`."""
    dist.barrier()
    weight: DTensor = state["w"]
    weight.to_local().fill_(value)


def failure(folder: Path, state: dict[str, Any], **options: Any) -> str:
    """Save, in the background, and wait; the error, which a trainer would log before it goes on."""
    try:
        checkpoint.save(folder, model=state, overwrite=True, async_op=True, **options).wait()
    except CheckpointError as error:
        return str(error)
    return ""


def stored(folder: Path) -> list[float]:
    into = {"w": torch.zeros(WIDTH)}
    checkpoint.load(folder, model=into, timeout_s=20)
    return into["w"].tolist()


# --- which save belongs to which --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@on_ranks(2, 3)
def test_no_checkpoint_mixes_two_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    """The last rank comes too late for the save of step 100. It must not be taken for one of those that save step 200;
    and soon all save together again."""
    folder = tmp_path / "latest"
    state = sharded(world_size, 0.0)
    assert not failure(folder, state, timeout_s=20)
    train(state, 100.0)
    handle, told = None, ""
    if rank == world_size - 1:
        time.sleep(2.5)
        try:
            handle = checkpoint.save(folder, model=state, overwrite=True, async_op=True, timeout_s=1)
        except CheckpointError as error:
            told = str(error)
    else:
        told = failure(folder, state, timeout_s=1)
    assert handle is None and "have not" in told, "it failed on every rank, at once: training goes on only then"
    train(state, 200.0)
    failure(folder, state, timeout_s=20)
    dist.barrier()
    assert len(set(stored(folder))) == 1, stored(folder)
    train(state, 300.0)
    assert not failure(folder, state, timeout_s=20)
    assert stored(folder) == [300.0] * WIDTH


@on_ranks(2)
def test_a_rank_that_fails_before_the_others_meet_it(rank: int, world_size: int, tmp_path: Path) -> None:
    """Ranks that wait for it are told at once, and why."""
    state = sharded(world_size, 100.0)
    if rank == 0:
        assert "have not" in failure(tmp_path / "latest", state, timeout_s=0.5)
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        assert "rank 1: ArgumentError" in failure(tmp_path / "latest", state, timeout_s=100)
    else:
        time.sleep(0.5)
        with pytest.raises(Exception, match="'bad'"):
            checkpoint.save(tmp_path / "latest", model=state, extra={"bad": object()}, overwrite=True, timeout_s=100)
    assert time.monotonic() - begun < 50
    assert not failure(tmp_path / "latest", state, timeout_s=20)


def with_groups_made_again(rank: int, root: str, port: str) -> list[float]:
    """Only one rank has saved before, in the group before: with a process that has died since."""
    state = {"w": torch.full((WIDTH,), 1.0)}
    alone = dist.new_group([0])
    if rank == 0:
        checkpoint.save(Path(root) / "latest", model=state, overwrite=True, process_group=alone)
        with pytest.raises(CheckpointError, match="ranks 1 have not"):
            checkpoint.save(Path(root) / "latest", model=state, overwrite=True, timeout_s=0.5)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root}/{port}", rank=rank, world_size=2)
    state["w"].fill_(2.0)
    checkpoint.save(Path(root) / "latest", model=state, overwrite=True, timeout_s=10)
    return stored(Path(root) / "latest")


def test_groups_that_are_made_again(tmp_path: Path) -> None:
    (outcomes,) = run_cases([Case(with_groups_made_again, 2, (str(tmp_path), "meeting"))])
    assert all(outcome.ok and outcome.value == [2.0] * WIDTH for outcome in outcomes), outcomes


# --- threads that cannot be started -----------------------------------------------------------------------------------


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@on_ranks(2, timeout_s=60)
def test_a_background_save_without_a_thread(rank: int, world_size: int, tmp_path: Path) -> None:
    """Every rank hears of it at once; the next save works."""
    state = sharded(world_size, 1.0)
    begun = time.monotonic()
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                checkpoint.save(tmp_path / "a", model=state, async_op=True, timeout_s=100)
    else:
        assert "rank 1: RuntimeError: can't start" in failure(tmp_path / "a", state, timeout_s=100)
    assert time.monotonic() - begun < 50
    assert not failure(tmp_path / "b", state, timeout_s=20)


def test_no_thread_outlives_an_interruption() -> None:
    """Not even one that comes while the threads are being started."""
    start, running = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "test-ctrl-c-2":
            raise KeyboardInterrupt
        start(thread)

    def work(item: int) -> None:
        running.append(item)
        time.sleep(0.3)
        running.remove(item)

    threading.Thread.start = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(work, range(100), 4, "test-ctrl-c")
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    assert not running and not [thread for thread in threading.enumerate() if thread.name.startswith("test-ctrl-c")]


# --- a last rank that dies --------------------------------------------------------------------------------------------


def dying(rank: int, root: str) -> None:
    """Rank 1 is the last, and dies when it gives the folder its name."""
    if rank == 1:
        time.sleep(0.5)
        committing.replace_folder = lambda *args: os._exit(9)  # type: ignore[assignment]
    checkpoint.save(Path(root) / "a", model={"w": torch.ones(3)}, timeout_s=1.5)


def test_the_last_rank_dies_while_it_completes_the_checkpoint(tmp_path: Path) -> None:
    (outcomes,) = run_cases([Case(dying, 2, (str(tmp_path),))])
    assert outcomes[0].raised("CheckpointError"), outcomes
    assert "the last one has not finished the work within 1.5 s" in outcomes[0].text, outcomes
    assert "the store" not in outcomes[0].text, outcomes
