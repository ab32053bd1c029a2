"""kill -9 of a rank at every step of a save: what was loadable stays so, and a retry commits.

A step is an operation that others can see: a system call that changes files, or an operation of the store. The victim
counts them and kills itself before the k-th, so the matrix is complete by construction: it ends where a save ends.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import checkpoint
from fsdp2.checkpoint.ranks import agreement
from tests.helpers.mortal_ranks import Case, Outcome, run_cases
from tests.helpers.mortal_saves import RANKS, TIMEOUT_S, check, first, save

# Hundreds of processes: seconds on an idle machine, and a busy one may need minutes.
pytestmark = pytest.mark.timeout(600)
exhaustive = pytest.mark.exhaustive

LIMIT_S = 15.0
LOTS = 2  # looked at at the same time

FILE_CALLS = ("ftruncate", "pwritev", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "link", "utime")
STORE_CALLS = ("clone", "compare_set", "set", "add", "multi_get", "get", "wait", "delete_key")


# --- counting and killing, in a rank ----------------------------------------------------------------------------------


class Steps:
    """Counts the steps of this process; ends it before the `last`. It reports up to `late` seconds late, to be last."""

    def __init__(self, last: int | None, late: float) -> None:
        self.names: list[str] = []
        self._last = last
        self._late = late
        self._lock = threading.Lock()

    def note(self, name: str) -> None:
        with self._lock:
            if len(self.names) == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """From here on every step counts."""
        original = agreement.store_of
        real = {name: getattr(os, name) for name in FILE_CALLS}
        for name, call in real.items():
            setattr(os, name, self._counted(name, call))
        agreement.store_of = lambda group: Watched(original(group), STORE_CALLS, self, "store.", self._late)
        try:
            yield
        finally:
            agreement.store_of = original
            for name, call in real.items():
                setattr(os, name, call)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return call(*args, **kwargs)

        return counted


class Watched:
    """An object some of whose methods are steps."""

    def __init__(self, inner: Any, names: tuple[str, ...], steps: Steps, prefix: str, late: float = 0.0) -> None:
        self._inner, self._names, self._steps, self._prefix, self._late = inner, names, steps, prefix, late

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "add" and self._late:
                self._wait_for_others(args[0])
            self._steps.note(self._prefix + name)
            result = value(*args, **kwargs)
            if name == "clone":
                return Watched(result, self._names, self._steps, self._prefix, self._late)
            return result

        return call

    def _wait_for_others(self, counter: str) -> None:
        """Be the last one to report, unless the others never do."""
        deadline = time.monotonic() + self._late
        while self._inner.add(counter, 0) < RANKS - 1 and time.monotonic() < deadline:
            time.sleep(0.01)


# --- bodies -----------------------------------------------------------------------------------------------------------


def attempt(
    rank: int, root: str, victim: int | None, last: int | None, committer: int, options: dict[str, Any]
) -> list[str]:
    """Save step 2 over nothing, or step 1 again with the values of step 2; the victim dies before its step `last`."""
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {"timeout_s": TIMEOUT_S, **options}
    steps = Steps(last if rank == victim else None, late=0.4 * state["timeout_s"] if rank == committer else 0.0)
    with steps.watched():
        save(root, 1 if state.get("overwrite") else 2, rank, mesh, values=2, **state)
    return steps.names


def aftermath(rank: int, roots: list[str], overwrite: bool) -> list[bool | str]:
    """In new processes, for each root: whether the attempt has committed. Checks what is there, and that a retry
    commits; a string says what is wrong."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found: list[bool | str] = []
    for root in roots:
        torch.distributed.barrier()
        try:
            found.append(look(root, overwrite, rank, mesh))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        torch.distributed.barrier()  # nobody writes before all have looked
        try:
            save(root, 2, rank, mesh, timeout_s=10, overwrite=True)
            check(os.path.join(root, "step-00000002"), 2, rank, mesh)
        except Exception as error:
            found[-1] = f"retry: {type(error).__name__}: {error}"
    return found


def look(root: str, overwrite: bool, rank: int, mesh: DeviceMesh) -> bool:
    newest = checkpoint.latest(root)
    assert newest is not None
    committed = probe(newest) == 2 if overwrite else newest.endswith("2")
    check(newest, 2 if committed else 1, rank, mesh)
    if not overwrite:
        check(os.path.join(root, "step-00000001"), 1, rank, mesh)
    return committed


def probe(folder: str) -> int:
    """Which values are there, by the name that is stored with them."""
    return int(checkpoint.load(folder, timeout_s=30).extra["data"]["position"])


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with step 1, to be copied."""
    root = tmp_path_factory.mktemp("first") / "run"
    assert all(outcome.ok for outcome in run_cases([Case(first, RANKS, (str(root),))])[0])
    return root


def copies(one_checkpoint: Path, tmp_path: Path, count: int) -> list[str]:
    roots = [str(tmp_path / str(index)) for index in range(count)]
    for root in roots:
        shutil.copytree(one_checkpoint, root)
    return roots


def run_kills(cases: list[Case], roots: list[str], labels: list[str], victim: int, overwrite: bool) -> list[str]:
    """Run the cases, then see what they left; what is wrong."""
    results = run_cases(cases)
    lots = [roots[index::LOTS] for index in range(LOTS) if roots[index::LOTS]]
    after = run_cases([Case(aftermath, RANKS, (lot, overwrite), limit_s=100) for lot in lots])
    assert all(outcome.ok for outcomes in after for outcome in outcomes), after
    found = {
        root: outcomes[rank].value[index]
        for lot, outcomes in zip(lots, after, strict=True)
        for rank in range(RANKS)
        for index, root in enumerate(lot)
    }
    problems = []
    for outcomes, root, label in zip(results, roots, labels, strict=True):
        problem = verdict(outcomes[1 - victim], found[root], root, overwrite)
        if problem is not None:
            problems.append(f"{label}: {problem}")
    return problems


def verdict(survivor: Outcome, found: bool | str, root: str, overwrite: bool) -> str | None:
    """What is wrong with how a case ended; None if nothing is."""
    if isinstance(found, str):
        return f"afterwards, {found}"
    if survivor.ok != found:
        return f"the checkpoint {'has' if found else 'has not'} been committed, and the survivor: {survivor}"
    if not survivor.ok and not survivor.raised("CheckpointError"):
        return f"the survivor: {survivor}"
    left = sorted(set(os.listdir(root)) - {"step-00000001", "step-00000002"})
    if left and not overwrite:
        return f"left over: {left}"
    return None


@pytest.mark.parametrize(
    ("victim", "committer", "store", "options"),
    [
        pytest.param(1, 1, "agent", {}, id="last"),
        pytest.param(1, 1, "agent", {"overwrite": True}, id="replacing", marks=exhaustive),
        pytest.param(0, 0, "rank 0", {}, id="last and the store", marks=exhaustive),
        pytest.param(0, 1, "agent", {}, id="first", marks=exhaustive),
        pytest.param(0, 0, "agent", {"consolidated": True}, id="consolidated", marks=exhaustive),
    ],
)
def test_killed_before_every_step(
    one_checkpoint: Path, tmp_path: Path, victim: int, committer: int, store: str, options: dict[str, Any]
) -> None:
    probe_root = copies(one_checkpoint, tmp_path / "probe", 1)[0]
    # The one that nobody disturbs must succeed: on a busy machine it may take longer than `TIMEOUT_S`.
    unhurried = {**options, "timeout_s": LIMIT_S}
    done = run_cases([Case(attempt, RANKS, (probe_root, None, None, committer, unhurried), store=store)])[0]
    assert all(outcome.ok for outcome in done), done
    names = done[victim].value
    kills = list(range(len(names)))
    if victim != committer or options:  # until it reports, it does the same as the last one did above
        kills = kills[names.index("store.set") :]
    elif store == "rank 0":
        kills = [last for last in kills if names[last].startswith("store.") or last > names.index("store.add")]
    assert len(kills) >= 5
    roots = copies(one_checkpoint, tmp_path, len(kills))
    cases = [
        Case(attempt, RANKS, (root, victim, last, committer, options), store=store, limit_s=LIMIT_S)
        for root, last in zip(roots, kills, strict=True)
    ]
    labels = [f"step {last}, before {names[last]}" for last in kills]
    problems = run_kills(cases, roots, labels, victim, bool(options.get("overwrite")))
    assert not problems, "\n" + "\n".join(problems)
