"""The benchmarks run: each at its smallest size, as a user starts it, so that they do not rot. Nothing is timed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fake import FakeRank, in_fake_rank
from benchmarks.memory.tracking import Kind, Tracker, timeline
from benchmarks.plan.main import tables
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

# In a process of pytest's, threads of other tests may be there; the forked one uses none of what they held.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.timeout(320),
]

TIMEOUT_SECONDS = 300  # seconds on a quiet machine; others may be busy


# The file that a figure is drawn from, and on how many ranks the program runs; None for a single process.
PROGRAMS: dict[str, tuple[str, int | None]] = {
    "step_time": ("cpu_2ranks_float32.json", 2),
    "host_overhead": ("cpu_fake.json", None),
    "memory": ("cpu_2ranks_float32.json", 2),
    "world_size": ("cpu_fake.json", None),
    "collectives": ("cpu_2ranks.json", 2),
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(script: str | Path, *arguments: str | Path, ranks: int | None = None) -> str:
    done = run_script(script, *arguments, ranks=ranks, cwd=ROOT, environment=ENVIRONMENT, timeout_s=TIMEOUT_SECONDS)
    assert done.status == 0, f"{script} {arguments}\n{done.output}\n{done.errors}"
    return done.output


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each program, filled by the tests of `test_a_program_runs`."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "step_time" else [pytest.mark.exhaustive]) for name in PROGRAMS],
)
def test_a_program_runs(results: Path, name: str) -> None:
    file, ranks = PROGRAMS[name]
    out = results / name / file
    printed = run(ROOT / "benchmarks" / name / "main.py", "--dry-run", "--out", out, ranks=ranks)
    assert "| --: |" in printed, "no table for the README"
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"question", "command", "date", "hardware", "versions", "ranks"} <= set(result)
    if name == "memory":
        whole = result["unit_bytes"]["root"] + result["workload"]["blocks"] * result["unit_bytes"]["block"]
        for name, peaks in result["peaks"].items():
            assert peaks["shards"] == pytest.approx(whole / 2, rel=0.02), name  # padded
            assert peaks["allocated"] >= peaks["unsharded"] > 0, name


@pytest.mark.exhaustive
def test_every_figure_is_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    there = {name for name in PROGRAMS if (results / name).exists()}  # fewer when only some tests are run
    run("-m", "benchmarks.figures", "--source", results, "--folder", tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == there
    assert all(path.stat().st_size < 60_000 for path in tmp_path.iterdir()), "too large to be committed"


def test_a_tracker_follows_storages_that_are_resized_and_dropped() -> None:
    numel = 1000
    with Tracker() as tracker:
        param = nn.Parameter(torch.zeros(numel))
        tracker.mark(param, Kind.PARAMETER)
        since = tracker.now
        other = param.detach() * 2
        with torch.no_grad():
            param.untyped_storage().resize_(0)
        other = other[:10].clone()
        other.add_(1)
    moments = timeline(tracker, since, tracker.now)
    held = [(moment.nbytes[Kind.PARAMETER], moment.nbytes[Kind.OTHER]) for moment in moments]
    assert held[0] == (4 * numel, 0)
    assert (4 * numel, 4 * numel) in held
    assert held[-1] == (0, 4 * 10)


def test_a_tracker_tells_what_is_communicated_and_what_is_a_gradient() -> None:
    kinds = in_fake_rank(FakeRank(0, 4), _kinds)
    assert kinds == {"parameter": 4 * 64, "gradient": 4 * 64, "communication": 4 * 100}


def _kinds() -> dict[str, int]:
    linear = nn.Linear(8, 8, bias=False)
    with Tracker() as tracker:
        tracker.follow(linear)
        buffer = torch.zeros(100)
        dist.all_reduce(buffer)
        linear(torch.ones(1, 8)).sum().backward()
        buffer.add_(1)
    last = timeline(tracker, 0, tracker.now)[-1].nbytes
    return {kind.name.lower(): last[kind] for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.COMMUNICATION)}


@pytest.mark.parametrize("backend", ["fake", "silent"])
def test_a_rank_that_fails_says_so(backend: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank=3, ranks=8.*nothing to divide by"):
        in_fake_rank(FakeRank(3, 8, backend), _fail)


def _fail() -> None:
    raise ZeroDivisionError("nothing to divide by")


def test_the_tables_of_plans_are_those_of_the_results() -> None:
    text = (ROOT / "benchmarks/plan/README.md").read_text()
    assert tables() and all(table in text for table in tables())


OTHERS: dict[str, tuple[str, int | None]] = {
    "plan/main.py": ("| experts |", None),
    "offload/main.py": ("| fsdp2, all, fused |", 2),
    "offload/activations.py": ("| width 16, a budget that suffices |", None),
    "offload/disk.py": ("| fsdp2, parameters too |", None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_others_print_their_tables(tmp_path: Path, name: str) -> None:
    row, ranks = OTHERS[name]
    where = ["--tier", tmp_path] if name == "offload/disk.py" else []
    printed = run(ROOT / "benchmarks" / name, "--dry-run", *where, "--out", tmp_path / "out.json", ranks=ranks)
    assert row in printed and json.loads((tmp_path / "out.json").read_text())
    assert not [*tmp_path.glob("*fsdp2*")]
