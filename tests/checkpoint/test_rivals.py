"""Around one name: writers, readers, `prune` and death at the same time, in real processes.

What must hold: at no moment is there no loadable checkpoint where there was one; none is ever mixed of two saves;
nothing sound is called damaged; and whatever a dead process leaves, the next save of that name commits.

Every process is a job of its own (without a process group), unless a test says otherwise. All values of a save are the
same number, so a mixture shows.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import checkpoint
from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.errors import CheckpointError, ReplacedError
from tests.helpers.mortal_ranks import Case, Kill, Outcome, begin, run_cases
from tests.helpers.object_store import bucket

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 60.0
SAVES = 6
FIRST_NEW, LAST_NEW = 10, 15
EXHAUSTIVE = pytest.mark.exhaustive


# --- what is saved, and how it is looked at ---------------------------------------------------------------------------


def state(value: int) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((60, 50), float(value)), "b": torch.full((7,), value)},
        "optimizer": {"m": torch.full((3000,), float(value))},
        "extra": {"value": value, "t": torch.full((9,), value)},
    }


def save(root: str, value: int, step: int = 1, **options: Any) -> None:
    checkpoint.save(root, **state(value), step=step, **options)


def value_of(folder: str, verify: bool = True) -> int:
    """The number of which all values are; `AssertionError` if they are of several saves."""
    into = state(-1)
    extra = checkpoint.load(folder, model=into["model"], optimizer=into["optimizer"], verify=verify).extra
    numbers = {float(x) for each in (*into["model"].values(), *into["optimizer"].values()) for x in each.unique()}
    numbers |= {float(extra["value"]), *map(float, extra["t"])}
    assert len(numbers) == 1, f"MIXED: {numbers}"
    return int(numbers.pop())


def look(root: str, verify: bool) -> str | None:
    """What is wrong with the newest checkpoint of a run, which has one; None if nothing is. `prune` may delete it
    between two calls, when there is a newer one."""
    newest = None
    while True:
        before = newest
        try:
            newest = checkpoint.latest(root)
            if newest is None:
                return "NONE: there is no checkpoint"
            value_of(newest, verify)
        except ReplacedError:  # as documented, if writers are faster than this reader three times in turn
            newest = None
        except Exception as error:
            if newest == before:
                return f"{type(error).__name__}: {error}"
        else:
            return None


# --- roles of processes -----------------------------------------------------------------------------------------------

Role = Callable[["Scene"], Any]


class Scene:
    """What a process knows: where, its number, its own random numbers, and which of the others are to end."""

    def __init__(self, rank: int, root: str, seed: int, awaited: list[int], marks: str = "") -> None:
        self.rank, self.root = rank, root
        self._marks = marks or root
        self.random = random.Random(f"{seed} {rank}")
        self._awaited = awaited
        self._deadline = time.monotonic() + LIMIT_S / 2

    def pause(self, longest_s: float = 0.004) -> None:
        time.sleep(self.random.uniform(0, longest_s))

    def ended(self) -> None:
        Path(f"{self._marks}.ended-{self.rank}").touch()

    def over(self) -> bool:
        late = time.monotonic() > self._deadline
        return late or all(os.path.exists(f"{self._marks}.ended-{rank}") for rank in self._awaited)


def play(
    rank: int, root: str, roles: list[str], seed: int, awaited: list[int], alone: bool = True, marks: str = ""
) -> Any:
    """A process of a case: its role, and what came of it."""
    if alone:
        dist.destroy_process_group()
    scene = Scene(rank, root, seed, awaited, marks)
    begin()
    scene.pause()
    try:
        return ROLES[roles[rank]](scene)
    finally:
        scene.ended()


def tries(scene: Scene, number: int, **options: Any) -> list[str]:
    """Save values of this process' own; the error, if there is one."""
    try:
        save(scene.root, 1000 * (scene.rank + 1) + number, **options)
    except CheckpointError as error:
        return [str(error)]
    finally:
        scene.pause()
    return []


def overwrites(scene: Scene) -> list[str]:
    """Save one name again and again; the errors."""
    return [error for number in range(SAVES) for error in tries(scene, number, overwrite=True)]


def overwrites_as_one_job(scene: Scene) -> None:
    """All ranks together, back to back, each with values of its own."""
    for number in range(50):
        value = torch.full((100,), float(number))
        options = {"overwrite": True, "async_op": number % 3 == 2}
        checkpoint.save(scene.root, model={"w": value}, extra={"r": scene.rank}, step=1, timeout_s=20, **options)
    checkpoint.save(scene.root, model={"w": value}, extra={"r": scene.rank}, step=1, timeout_s=20, overwrite=True)


def watches(scene: Scene) -> tuple[int, list[str]]:
    """Look again and again until the others are done: how often, and what was wrong."""
    looks, problems = 0, []
    while not scene.over():
        problem = look(scene.root, verify=scene.random.random() < 0.5)
        looks += 1
        if problem is not None:
            problems.append(problem)
    return looks, problems


def goes_on(scene: Scene) -> None:
    """A run: saves, every step a new name."""
    for number in range(FIRST_NEW, LAST_NEW + 1):
        save(scene.root, number, step=number)
        scene.pause()


def competes(scene: Scene) -> list[str]:
    """As a run does, but the steps may be there, or be saved by another job now; the errors."""
    return [error for number in range(FIRST_NEW, LAST_NEW + 1) for error in tries(scene, number, step=number)]


def prunes(scene: Scene) -> int:
    """Prune again and again until the others are done."""
    gone = 0
    while not scene.over():
        gone += len(checkpoint.prune(scene.root, keep=1))
        scene.pause()
    return gone


ROLES: dict[str, Role] = {
    role.__name__: role for role in (overwrites, overwrites_as_one_job, watches, goes_on, competes, prunes)
}


# --- cases ------------------------------------------------------------------------------------------------------------


def rounds(
    tmp_path: Path,
    roles: list[str],
    count: int,
    steps: int = 1,
    kill_within_s: float | None = None,
    remote: bool = False,
    alone: bool = True,
) -> list[tuple[str, list[Outcome]]]:
    """Run cases with these roles, each in a folder that has checkpoints of the first steps.

    Args:
        remote: the folder is in an object store.
        kill_within_s: process 0 is killed at some moment in that time.

    Returns:
        for each the folder of the run, and how its processes ended.
    """
    cases, roots = [], []
    for seed in range(count):
        folder = tmp_path / f"run {seed}"
        if remote:
            folder.mkdir()
        roots.append(f"{bucket(folder)}/run" if remote else str(folder))
        for step in range(1, steps + 1):
            save(roots[-1], step, step=step)
        kill = None if kill_within_s is None else Kill(0, random.Random(seed).uniform(0, kill_within_s))
        watchers = [rank for rank, role in enumerate(roles) if role in ("watches", "prunes")]
        awaited = [rank for rank in range(len(roles)) if rank not in watchers and (rank or kill is None)]
        cases.append(
            Case(play, len(roles), (roots[-1], roles, seed, awaited, alone, str(folder)), kill, limit_s=LIMIT_S)
        )
    return list(zip(roots, run_cases(cases), strict=True))


def afterwards(root: str, step: int = 1) -> list[str]:
    """What is wrong with what processes have left: it must load, the next save of that name must commit, and nothing
    may lie about then."""
    problems = [] if (found := look(root, verify=True)) is None else [found]
    try:
        save(root, 7, step=step, overwrite=True)
        assert value_of(os.path.join(root, f"step-{step:08d}")) == 7
    except Exception as error:
        problems.append(f"next save: {type(error).__name__}: {error}")
    left = [name for name in os.listdir(root) if f"step-{step:08d}" in name and name != f"step-{step:08d}"]
    return problems + ([f"left over: {left}"] if left else [])


def problems_of(outcome: Outcome) -> list[str]:
    """Of one process: an error, or what a watcher saw."""
    if outcome.ok:
        return outcome.value[1] if isinstance(outcome.value, tuple) else []
    return [] if outcome.value == "SIGKILL" else [f"{outcome.how}: {outcome.value} {outcome.text}"]


def judge(
    results: list[tuple[str, list[Outcome]]],
    also: Callable[[str, list[Outcome]], list[str]] = lambda root, outcomes: [],
) -> None:
    """Fail with a count of each kind of problem: of the processes, and of what `also` finds in a run's folder."""
    found = [
        (root, [problem for one in outcomes for problem in problems_of(one)] + also(root, outcomes))
        for root, outcomes in results
    ]
    bad = [(root, problems) for root, problems in found if problems]
    kinds = Counter(problem.replace(root, "")[:110] for root, problems in bad for problem in problems)
    text = "\n".join(f"{count:5} x {kind}" for kind, count in kinds.most_common(12))
    looks = sum(one.value[0] for _, outcomes in results for one in outcomes if one.ok and isinstance(one.value, tuple))
    assert not bad, f"{len(bad)} of {len(found)} rounds ({looks} looks):\n{text}"


def unwanted(outcomes: list[Outcome], *wanted: str) -> list[str]:
    """Errors of the two writers, but for those that they must get."""
    errors = [error for one in outcomes[:2] if one.ok for error in one.value]
    return [f"save: {error}" for error in errors if not any(each in error for each in wanted)]


sampled = pytest.mark.parametrize("count", [6, pytest.param(30, marks=EXHAUSTIVE)])
sampled_remote = pytest.mark.parametrize("count", [3, pytest.param(20, marks=EXHAUSTIVE)])  # requests take time


@sampled
def test_two_jobs_that_overwrite_one_name(count: int, tmp_path: Path) -> None:
    """A requeued job beside the old one: each deleted what the other was writing, then what had been there. Readers
    mixed two saves, or called sound files damaged."""
    results = rounds(tmp_path, ["overwrites", "overwrites", "watches"], count)
    told = "another save to this name has completed"
    judge(results, lambda root, outcomes: afterwards(root) + unwanted(outcomes, told))


@sampled
def test_one_job_that_overwrites_one_name(count: int, tmp_path: Path) -> None:
    """Back to back, some of it in the background: the clean-up of one save took the folder of the next for a dead
    one's."""
    count = -(-count // 15)
    results = rounds(tmp_path, ["overwrites_as_one_job"] * 3, count, steps=0, alone=False)
    judge(results)


@sampled
def test_prune_beside_a_writer(count: int, tmp_path: Path) -> None:
    def also(root: str, outcomes: list[Outcome]) -> list[str]:
        lost = [] if f"step-{LAST_NEW:08d}" in os.listdir(root) else ["LOST: what was saved last"]
        return lost + afterwards(root, LAST_NEW)

    judge(rounds(tmp_path, ["goes_on", "prunes", "watches"], count, steps=3), also)


@sampled
def test_killed_while_overwriting(count: int, tmp_path: Path) -> None:
    results = rounds(tmp_path, ["overwrites", "overwrites", "watches"], count, kill_within_s=0.06)
    judge(results, lambda root, outcomes: afterwards(root))


def afterwards_remote(root: str, outcomes: list[Outcome]) -> list[str]:
    """What is wrong in an object store: each step that jobs have competed for must be one of theirs, with no file of
    the other's beside it; who could not save it was told why."""
    problems = []
    for step in range(FIRST_NEW, LAST_NEW + 1):
        folder = f"{root}/step-{step:08d}"
        try:
            assert value_of(folder) in (1000 + step, 2000 + step), "another step's values"
            storage, path = storage_of(folder)
            catalog = open_catalog(storage, path)
            assert isinstance(catalog, NativeCatalog)
            names = catalog.storage.names(catalog.path)
            left = [name for name in names if name != MANIFEST and name not in catalog.manifest.files]
            if left and all(one.ok for one in outcomes):  # a dead job's stay until that step is saved again
                problems.append(f"left over: {left}")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    return problems + unwanted(outcomes, "another save has completed a checkpoint there", "is a checkpoint already")


@sampled_remote
@pytest.mark.parametrize("kill_within_s", [None, 0.1], ids=["", "killed"])
def test_two_jobs_that_save_to_one_object_store(kill_within_s: float | None, count: int, tmp_path: Path) -> None:
    """Nothing is renamed: whose manifest comes first counts, and the other takes only its own files away."""
    roles = ["competes", "competes", "watches"]
    judge(rounds(tmp_path, roles, count, kill_within_s=kill_within_s, remote=True), afterwards_remote)
