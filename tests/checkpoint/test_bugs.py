"""Bugs of `fsdp2.checkpoint` that an independent review found; each test tells its story."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import ArgumentError, CheckpointError, MismatchError, checkpoint
from fsdp2.checkpoint.storage.local import LocalWriter
from tests.helpers.ranks import on_ranks, run_on_ranks
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


@pytest.mark.parametrize(
    "give",
    [
        {"model": {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}},
        {"extra": {"a/b": {"c": torch.zeros(2)}, "a": {"b": {"c": torch.ones(2)}}}},
    ],
    ids=["model", "extra"],
)
def test_two_tensors_under_one_name(give: dict[str, Any], tmp_path: Path) -> None:
    """The second took the place of the first, or the file could not be read."""
    with pytest.raises(ArgumentError, match="two tensors would be stored under this name"):
        checkpoint.save(tmp_path / "a", **give)


def test_keys_one_and_its_text(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", extra={"a": {1: torch.zeros(2), "1": torch.ones(2)}})
    found = checkpoint.load(tmp_path / "a").extra["a"]
    assert found[1].eq(0).all() and found["1"].eq(1).all()


@on_ranks(2)
def test_values_that_differ_between_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Everybody got those of the last rank."""
    with pytest.raises(CheckpointError, match=r"'n': ranks .* have different values"):
        checkpoint.save(tmp_path / "a", model={"n": rank})
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + rank))
    with pytest.raises(CheckpointError, match=r"optimizer options of 'weight'.*belongs to extra="):
        checkpoint.save(tmp_path / "b", model=layer, optimizer=optimizer)


def test_prune_keeps_what_can_be_loaded(tmp_path: Path) -> None:
    """A damaged newest checkpoint counted as the one to keep."""
    for step in (1, 2):
        checkpoint.save(tmp_path, model={"w": torch.ones(2)}, step=step)
    next((tmp_path / "step-00000002").glob("model-*")).unlink()
    assert checkpoint.prune(tmp_path, keep=1) == []
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.endswith("step-00000001")


def test_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state["global"] = {"k": 7}  # type: ignore[index]
    with pytest.raises(ArgumentError, match="'global', which is no parameter"):
        checkpoint.save(tmp_path / "a", model=layer, optimizer=optimizer)


def test_generators_come_back_last(tmp_path: Path) -> None:
    """An object that draws while it takes its state moved them."""

    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.rand(3)

    extra = {"random": checkpoint.RandomState(), "loader": Draws()}
    checkpoint.save(tmp_path / "a", extra=extra)
    wanted = torch.rand(4)
    checkpoint.load(tmp_path / "a", extra=extra)
    assert torch.equal(torch.rand(4), wanted)


def saves_alone(rank: int, world_size: int, folder: Path) -> None:
    checkpoint.save(folder, extra={"random": checkpoint.RandomState()})


def draws(rank: int, world_size: int, folder: Path) -> float:
    with pytest.warns(UserWarning, match="random state of 1 ranks, and now there are 2"):
        checkpoint.load(folder, extra={"random": checkpoint.RandomState()})
    return torch.rand(()).item()


def test_one_stream_never_becomes_two_alike(tmp_path: Path) -> None:
    """What one rank saved was taken to be the same everywhere, generators included."""
    run_on_ranks(saves_alone, 1, folder=tmp_path / "a")
    first, second = run_on_ranks(draws, 2, folder=tmp_path / "a")
    assert first != second


def test_nested_dicts_are_filled_in_place(tmp_path: Path) -> None:
    """They were replaced by new tensors, and the model stayed as it was."""
    saved, other = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoint.save(tmp_path / "a", model={"model": saved.state_dict()})
    checkpoint.load(tmp_path / "a", model={"model": other.state_dict()})
    assert torch.equal(other.weight, saved.weight)
    with pytest.raises(MismatchError, match=r"'model/weight': stored with shape \[2, 3\], here \[3, 3\]"):
        checkpoint.load(tmp_path / "a", model={"model": nn.Linear(3, 3).state_dict()}, strict=False)


@on_ranks(2)
def test_large_plain_weights_that_are_tied(rank: int, world_size: int, tmp_path: Path) -> None:
    """They were stored twice, since their owners are chosen by name."""
    weight = torch.zeros(600, 600)
    checkpoint.save(tmp_path / "a", model=dict.fromkeys(("embed", "head", "other"), weight))
    assert len(checkpoint.describe(tmp_path / "a").tensors) == 1


@on_ranks(4)
def test_copies_that_are_none(rank: int, world_size: int, tmp_path: Path) -> None:
    """Experts of each half of the ranks, under one name: only those of the first half were stored."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    everywhere = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()], run_check=False)
    same = DTensor.from_local(torch.ones(2), mesh["dp"], [Shard(0)], run_check=False)
    checkpoint.save(tmp_path / "same", model={"dense": everywhere, "expert": same})
    own = DTensor.from_local(torch.full((2,), 1.0 + rank // 2), mesh["dp"], [Shard(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"ranks 0 and 2 hold tensors of the same names .* with different values"):
        checkpoint.save(tmp_path / "own", model={"dense": everywhere, "expert": own})


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
