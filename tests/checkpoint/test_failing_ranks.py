"""Ranks that cannot write, do not agree, come late or are interrupted: every rank learns it in time, and the checkpoint
before is as it was."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CheckpointError, checkpoint
from fsdp2.checkpoint import saving
from fsdp2.checkpoint.run import committing
from tests.helpers.mortal_ranks import Case, Kill, Outcome, begin, run_cases
from tests.helpers.mortal_saves import RANKS, check, first, save, tensors
from tests.helpers.source_tree import ROOT


def run(body: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    return run_cases([Case(body, RANKS, args, **options)])[0]


def retry(rank: int, root: str, step: int = 2) -> None:
    """What was there is as it was, and the same step can be saved now."""
    mesh = init_device_mesh("cpu", (RANKS,))
    newest = checkpoint.latest(root)
    assert newest is not None and newest.endswith("1"), newest
    check(newest, 1, rank, mesh)
    dist.barrier()
    save(root, step, rank, mesh, timeout_s=30)
    check(os.path.join(root, f"step-{step:08d}"), step, rank, mesh)
    assert not [name for name in os.listdir(root) if name.startswith(f".tmp-step-{step:08d}")]


def assert_all_ok(outcomes: list[Outcome]) -> None:
    assert all(outcome.ok for outcome in outcomes), outcomes


# --- disks ------------------------------------------------------------------------------------------------------------


def with_small_files(rank: int, root: str, victim: int, limit: int) -> None:
    """The victim's files cannot become larger than `limit` bytes."""
    mesh = init_device_mesh("cpu", (RANKS,))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save(root, 2, rank, mesh, timeout_s=10)


@pytest.mark.parametrize(("victim", "limit"), [(0, 0), (1, 100), (1, 4100)])
def test_files_that_cannot_grow(tmp_path: Path, victim: int, limit: int) -> None:
    """As on a full disk: who could not write says so, the other repeats it, and nothing stays of that save."""
    root = str(tmp_path)
    assert_all_ok(run(first, root))
    outcomes = run(with_small_files, root, victim, limit)
    assert outcomes[victim].raised("OSError"), outcomes
    assert outcomes[1 - victim].raised("CheckpointError")
    assert f"rank {victim}: OSError" in outcomes[1 - victim].text and "too large" in outcomes[1 - victim].text
    assert not [*tmp_path.glob(".tmp-*/*")], "the dead save takes room"
    assert_all_ok(run(retry, root))


def with_a_failing_end(rank: int, root: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    committing.replace_folder = fail  # type: ignore[assignment]
    save(root, 2, rank, init_device_mesh("cpu", (RANKS,)), timeout_s=10)


def test_the_last_one_fails(tmp_path: Path) -> None:
    """When all files are there, and the folder gets its name."""
    root = str(tmp_path)
    assert_all_ok(run(first, root))
    outcomes = run(with_a_failing_end, root)
    assert sorted(outcome.raised("OSError") for outcome in outcomes) == [False, True], outcomes
    assert all("No space left" in outcome.text for outcome in outcomes), outcomes
    assert_all_ok(run(retry, root))


# --- ranks that do not agree ------------------------------------------------------------------------------------------

WAITING = ("step", "a rank that raises before")  # where ranks wait for others in vain

# About what: (what the error says, what a rank changes in the arguments and the state that it saves).
DISAGREEMENTS: dict[str, tuple[str, Callable[[int, dict[str, Any], dict[str, Any]], object]]] = {
    "step": (r"ranks? \d have not", lambda rank, options, state: options.update(step=2 + rank)),
    "an option": ("overwrite", lambda rank, options, state: options.update(overwrite=rank == 1)),
    "layout": ("consolidated|different tensors", lambda rank, options, state: options.update(consolidated=rank == 1)),
    "names": ("'all'", lambda rank, options, state: rank and state.pop("all")),
    "shapes": ("'all'", lambda rank, options, state: rank and state.update(all=torch.zeros(8))),
    "dtypes": ("'all'", lambda rank, options, state: rank and state.update(all=state["all"].double())),
    "the disk": ("shared folder", lambda rank, options, state: options.update(folder=f"{options['folder']} of {rank}")),
    "a value that cannot be saved": (
        "'a'",
        lambda rank, options, state: rank and options.update(extra={"a": object()}),
    ),
    "a rank that raises before": (r"ranks? 1 have not", lambda rank, options, state: rank and options.pop("today")),
}


def disagreeing(rank: int, root: str, about: str) -> float:
    """Save step 2, but this rank's way; how long it took to fail."""
    mesh = init_device_mesh("cpu", (RANKS,))
    # Where all come, nobody waits as long, unless a busy machine stops a rank, or the store, for seconds.
    timeout_s = 3 if about in WAITING else 20
    options: dict[str, Any] = {"folder": root, "timeout_s": timeout_s, "step": 2, "extra": {"a": 1}}
    state = tensors(2, mesh)
    DISAGREEMENTS[about][1](rank, options, state)
    begun = time.monotonic()
    try:
        checkpoint.save(model=state, **options)
    except Exception as error:
        error.args = (f"{time.monotonic() - begun:.2f} s: {error}",)
        raise
    return time.monotonic() - begun


@pytest.mark.sampled
@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_ranks_that_disagree(tmp_path: Path, about: str) -> None:
    """All raise, in time, and say about what; nobody hangs, and nothing is committed."""
    root = str(tmp_path / "run")
    assert_all_ok(run(first, root))
    outcomes = run(disagreeing, root, about)
    for rank, outcome in enumerate(outcomes):
        if about == "a rank that raises before" and rank == 1:
            continue
        assert outcome.raised("FSDPError"), outcomes
        assert float(outcome.text.split()[0]) < 30, outcome  # it did not hang
        assert re.search(DISAGREEMENTS[about][0], outcome.text), outcome
    for folder in tmp_path.glob("run of *"):
        assert checkpoint.checkpoints(folder) == []
    assert_all_ok(run(retry, root))


# --- ranks that come late ---------------------------------------------------------------------------------------------


def late(rank: int, root: str) -> list[str]:
    """Rank 1 comes when rank 0 has given up and tries again."""
    mesh = init_device_mesh("cpu", (RANKS,))
    if rank == 1:
        time.sleep(1.0)
    errors: list[str] = []
    for _ in range(3):
        try:
            save(root, 2, rank, mesh, timeout_s=0.3 if rank == 0 and not errors else 20)
            break
        except CheckpointError as error:
            errors.append(str(error))
    check(os.path.join(root, "step-00000002"), 2, rank, mesh)
    return errors


def test_a_rank_that_comes_too_late(tmp_path: Path) -> None:
    """The attempt that one rank has reported as failed does not commit later; the next one does."""
    root = str(tmp_path)
    assert_all_ok(run(first, root))
    outcomes = run(late, root)
    assert_all_ok(outcomes)
    (told,) = outcomes[0].value
    assert re.search(r"ranks? 1 have not", told), outcomes
    assert len(outcomes[1].value) <= 1 and all(re.search(r"1 have not", text) for text in outcomes[1].value), outcomes
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


# --- interruption -----------------------------------------------------------------------------------------------------


def interrupted(rank: int, root: str, async_op: bool, delay: float) -> None:
    """Save step 2, slowly, with Python's own handling of signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mesh = init_device_mesh("cpu", (RANKS,))
    write = saving.write_file

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(delay)
        written = write(*args, **kwargs)
        time.sleep(delay)
        return written

    saving.write_file = slow  # type: ignore[assignment]
    state, handle = tensors(2, mesh), None
    dist.barrier()
    try:
        begin()  # the clock of the signal: on a busy machine it came between this and the `try`
        handle = checkpoint.save(root, model=state, step=2, async_op=async_op, timeout_s=2)
        handle.wait()
    except KeyboardInterrupt:
        if handle is not None:
            handle.wait()  # as the interpreter does at exit
        raise KeyboardInterrupt("before it began" if handle is None else "in the background") from None


def committed(root: Path) -> bool:
    newest = checkpoint.latest(root)
    assert newest is not None
    checkpoint.load(newest, model={"all": torch.zeros(7, dtype=torch.int64)}, strict=False)
    return newest.endswith("2")


@pytest.mark.parametrize(
    "async_op", [pytest.param(False, id="sync", marks=pytest.mark.exhaustive), pytest.param(True, id="async")]
)
def test_signals(tmp_path: Path, async_op: bool) -> None:
    """SIGTERM and Ctrl-C of one rank at several moments: committed, for all, or not."""
    moments = [(name, after) for name in (signal.SIGTERM, signal.SIGINT) for after in (0.03, 0.1, 0.2, 0.4)]
    roots = [tmp_path / str(number) for number in range(len(moments))]
    for outcomes in run_cases([Case(first, RANKS, (str(root),)) for root in roots]):
        assert_all_ok(outcomes)
    cases = [
        Case(interrupted, RANKS, (str(root), async_op, 0.1), kill=Kill(0, after, name))
        for root, (name, after) in zip(roots, moments, strict=True)
    ]
    for root, outcomes, (name, after) in zip(roots, run_cases(cases), moments, strict=True):
        done = committed(root)
        said = f"{name.name} after {after} s: {outcomes}"
        assert outcomes[1].ok == done, said
        if not outcomes[1].ok:
            assert outcomes[1].raised("CheckpointError"), said
        if name == signal.SIGINT and not outcomes[0].ok:
            assert outcomes[0].raised("KeyboardInterrupt"), said
            assert done or outcomes[0].text == "before it began", said  # in the background it goes on
        if name == signal.SIGTERM and not outcomes[0].ok:
            assert outcomes[0].value == "SIGTERM", said


# --- the end of a process ---------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading, time, torch
from fsdp2 import checkpoint
from fsdp2.checkpoint import saving
root, how = sys.argv[1:]
write = saving.write_file
def slow(*args, **kwargs):
    time.sleep(0.3)
    if how == "fails":
        raise OSError(28, "No space left on device")
    return write(*args, **kwargs)
saving.write_file = slow
state = {"w": torch.arange(8.0)}
handle = checkpoint.save(root, model=state, optimizer=state, step=1, async_op=True)
state["w"].zero_()
if how == "interrupted":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(60)  # until then
elif how == "raises":
    raise ValueError("in training")
print("end of script")
"""


@pytest.mark.exhaustive
def test_the_end_of_a_process(tmp_path: Path) -> None:
    """A background save that is under way is finished, whatever ends the process; one that fails makes the exit code
    say so."""
    ways = ["ends", "raises", "interrupted", "fails"]
    running = {
        how: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, tmp_path / how, how],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for how in ways
    }
    ended = {how: (*process.communicate(timeout=150), process.returncode) for how, process in running.items()}
    for how in ways:
        newest = checkpoint.latest(tmp_path / how)
        assert (newest is None) == (how == "fails"), (how, ended[how])
        if newest is not None:
            into = {"w": torch.zeros(8)}
            checkpoint.load(newest, model=into)
            assert torch.equal(into["w"], torch.arange(8.0)), "as it was when save was called"
    codes = {how: code for how, (_, _, code) in ended.items()}
    assert codes == {"ends": 0, "raises": 1, "interrupted": -signal.SIGINT, "fails": 1}, ended
    assert "No space left" in ended["fails"][1] and "end of script" in ended["fails"][0]


def test_a_failure_in_the_background_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At `wait`, or else at the next save; once."""
    state = {"w": torch.arange(8.0)}

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    for told in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(saving, "write_file", fail)
            handle = checkpoint.save(tmp_path, model=state, step=1, async_op=True)
            while not handle.done():
                time.sleep(0.01)
        if told:
            with pytest.raises(CheckpointError, match="No space left"):
                handle.wait()
        else:
            with pytest.raises(CheckpointError, match="No space left"):
                checkpoint.save(tmp_path, model=state, step=1)
        assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, model=state, step=1)
    assert os.listdir(tmp_path) == ["step-00000001"]
