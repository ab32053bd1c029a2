"""Saves in the background: those that are waited for and interrupted, ranks that come late, processes that fork."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import ArgumentError, CheckpointError, checkpoint
from fsdp2.checkpoint import saving
from fsdp2.checkpoint.run.background import in_flight
from fsdp2.checkpoint.storage.local import LocalWriter
from tests.helpers.hostile_checkpoints import adam
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT


def test_an_interrupted_wait_does_not_forget_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while `save` waited for the one before: the next save then staged into memory that was being written."""
    slow, go = LocalWriter.write, threading.Event()

    def write(self: LocalWriter, offset: int, parts: Any) -> None:
        while not go.is_set():  # not `wait`, which the test replaces for a moment
            time.sleep(0.01)
        slow(self, offset, parts)

    monkeypatch.setattr(LocalWriter, "write", write)
    first = checkpoint.save(tmp_path, model={"w": torch.zeros(300_000)}, step=1, async_op=True)
    waiting, main = threading.Event.wait, threading.current_thread()

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is main:  # the writing threads wait for each other's start, and are not the user
            raise KeyboardInterrupt
        return waiting(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, model={"w": torch.ones(300_000)}, step=2, async_op=True)
    assert threading.Event.wait is waiting
    threading.Timer(0.3, go.set).start()
    checkpoint.save(tmp_path, model={"w": torch.full((300_000,), 3.0)}, step=3, async_op=True).wait()
    assert first.done()
    found = {"w": torch.empty(300_000)}
    checkpoint.load(tmp_path / "step-00000001", model=found)
    assert found["w"].eq(0).all()


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, and everything else is changed, before anything is written."""
    real, go = saving.write_file, threading.Event()
    monkeypatch.setattr(saving, "write_file", lambda *args, **options: (go.wait(60), real(*args, **options))[1])
    for consolidated in (False, True):
        go.clear()
        model, optimizer = adam()
        expected = [param.detach().clone() for param in model.parameters()]
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        extra = {"list": [0], "tensor": torch.ones(5)}
        options = {"consolidated": consolidated, "async_op": True}
        pending = checkpoint.save(
            tmp_path / str(consolidated), model=model, optimizer=optimizer, extra=extra, **options
        )
        extra["list"].append(1)
        optimizer.param_groups[0]["lr"] = 7.0
        with torch.no_grad():
            for each in (
                *model.parameters(),
                *(state["exp_avg"] for state in optimizer.state.values()),
                extra["tensor"],
            ):
                each.zero_()
        go.set()
        loaded = checkpoint.load(pending.wait(), model=model, optimizer=optimizer)
        assert all(map(torch.equal, model.parameters(), expected))
        assert all(map(torch.equal, [state["exp_avg"] for state in optimizer.state.values()], moments))
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert loaded.extra["list"] == [0] and loaded.extra["tensor"].eq(1).all()


@pytest.mark.parametrize("runs", [False, True])
def test_ctrl_c_while_a_background_save_begins(runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its thread runs or after: the next save waits for it, and not for ever."""
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "fsdp2-save" or runs:
            begin(thread)
        if thread.name == "fsdp2-save":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "a", model={"w": torch.zeros(3)}, async_op=True)
    assert (in_flight._handle is not None) == runs
    with suppress(CheckpointError):  # that the other ranks were told so
        in_flight.settle()
    checkpoint.save(tmp_path / "b", model={"w": torch.zeros(3)})


@on_ranks(2)
def test_a_late_rank_learns_at_once_why_a_save_failed(rank: int, world_size: int, tmp_path: Path) -> None:
    """A rank that began after another had failed went on to the next attempt, where it waited for ten minutes."""
    bad: dict[str, Any] = {"w": torch.zeros(3), **({"v": object()} if rank == 0 else {})}
    time.sleep(0.5 * rank)
    start = time.monotonic()
    with pytest.raises((ArgumentError, CheckpointError), match="object"):
        checkpoint.save(tmp_path / "late", model=bad, timeout_s=30)
    assert time.monotonic() - start < 10
    checkpoint.save(tmp_path / "late", model={"w": torch.zeros(3)}, timeout_s=30)


# --- forks ------------------------------------------------------------------------------------------------------------


FORKED = """
import os, sys, torch
from fsdp2 import checkpoint
torch.set_num_threads(16)
torch.get_num_threads()  # now the main thread has asked, and does not ask again when it is forked
failed = 0
for _ in range(20):
    if not (child := os.fork()):
        checkpoint.load(sys.argv[1], model={"w": torch.empty(1 << 12, 1 << 10, dtype=torch.float64)}, cast=True)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed)
"""


@pytest.mark.exhaustive
def test_ranks_that_were_forked(tmp_path: Path) -> None:
    """About one load of four hundred that goes through buffers (columns, another dtype) failed with "Invalid thread
    pool!" where a launcher had forked; with sixteen threads, nearly every one (see `workers.py`)."""
    checkpoint.save(tmp_path / "a", model={"w": torch.ones(1 << 12, 1 << 10)})
    command = [sys.executable, "-c", FORKED, tmp_path / "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_forked_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader, which saves what it has seen, waited for its parent's save: for a thread that is not
    in its process."""
    begun, go_on = threading.Event(), threading.Event()
    real = saving.write_file

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(saving, "write_file", slow)
    pending = checkpoint.save(tmp_path / "parent", model={"a": torch.ones(4)}, async_op=True)
    assert begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of threads
        child = os.fork()
    if not child:
        signal.alarm(30)
        code = 1
        try:
            go_on.set()  # the child's own
            checkpoint.save(tmp_path / "child", model={"a": torch.zeros(4)})
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    go_on.set()
    pending.wait()
    assert status == 0
    for name, value in (("parent", 1.0), ("child", 0.0)):
        into = {"a": torch.full((4,), 7.0)}
        checkpoint.load(tmp_path / name, model=into)
        assert into["a"].tolist() == [value] * 4
