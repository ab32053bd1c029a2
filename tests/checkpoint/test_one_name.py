"""Around one name, step by step: a save that another one overtakes, and readers whose folder is replaced."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint import opening
from fsdp2.checkpoint.io import reading
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.run.folders import TRIES
from fsdp2.errors import CheckpointError
from tests.helpers.ranks import on_ranks

NAME = "step-00000001"
EXHAUSTIVE = pytest.mark.exhaustive


def save(root: Path, value: float = 1.0, **options: Any) -> checkpoint.SaveHandle:
    return checkpoint.save(root, model={"w": torch.full((3,), value)}, step=1, overwrite=True, **options)


def value_at(root: Path) -> float:
    into = {"w": torch.zeros(3)}
    checkpoint.load(root / NAME, model=into)
    return float(into["w"][0])


class Stopping:
    """Calls `meanwhile` before one of the calls that look at a folder or change it, once the folder of the save is
    there, as if this process had been stopped there for hours."""

    NAMES = ("open", "rename", "replace", "unlink", "fsync", "listdir", "scandir", "lstat")

    def __init__(self, last: int, meanwhile: Callable[[], object], patch: pytest.MonkeyPatch):
        self.last, self.meanwhile = last, meanwhile
        self.calls, self.has_begun = 0, False
        for name in self.NAMES:
            patch.setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            if self.last:
                self.has_begun = self.has_begun or "/.tmp-" in str(args[:1])
                self.calls += self.has_begun
                if self.calls == self.last:
                    self.last = 0
                    self.meanwhile()
            return real(*args, **how)

        return call


@pytest.mark.parametrize(
    ("there_before", "every"), [(True, 5), *(pytest.param(before, 1, marks=EXHAUSTIVE) for before in (True, False))]
)
def test_stopped_anywhere_while_another_saves(there_before: bool, every: int, tmp_path: Path) -> None:
    """What the other has saved stays: it came later. A save that goes on put its older values over those, or left them
    under another name. It has no folder any more, and raises."""
    for last in range(1, 200, every):
        root = tmp_path / str(last)
        root.mkdir()
        if there_before:
            save(root, 0.0)
        outcome: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            stopping = Stopping(last, lambda root=root: save(root, 2.0), patch)
            try:
                save(root, 1.0)
            except CheckpointError as error:
                outcome.append(str(error))
        if stopping.last:
            break
        assert value_at(root) == 2.0, f"stopped at {last}: {outcome}"
        assert os.listdir(root) == [NAME], f"stopped at {last}: {outcome}"
        assert not outcome or "another save to this name has completed" in outcome[0], f"stopped at {last}: {outcome}"
    assert last > 12


@on_ranks(2)
def test_all_ranks_are_told_of_another_job(rank: int, world_size: int, tmp_path: Path) -> None:
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    real = checkpoint.saving.Records.put

    def put(*args: Any) -> None:
        real(*args)
        patch.undo()
        torch.distributed.barrier()
        if rank == 1:
            save(tmp_path, 2.0, process_group=alone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving.Records, "put", put)
        with pytest.raises(CheckpointError, match="another save to this name has completed"):
            save(tmp_path, 1.0, timeout_s=60)
    torch.distributed.barrier()
    assert value_at(tmp_path) == 2.0
    save(tmp_path, 3.0)
    assert value_at(tmp_path) == 3.0 and os.listdir(tmp_path) == [NAME]


# --- readers beside a writer ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_all_ranks_read_again_if_one_must(rank: int, world_size: int, tmp_path: Path) -> None:
    """Another job replaces the checkpoint when both have read its manifest, and rank 1 comes to files that are gone."""
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    save(tmp_path)
    torch.distributed.barrier()
    real, times = opening.manifest_at, []

    def manifest_at(*args: Any) -> Any:
        found = real(*args)
        times.append(found)
        if len(times) == 1:
            torch.distributed.barrier()
            if rank == 1:
                checkpoint.save(
                    tmp_path, model={"w": torch.full((3,), 2.0)}, step=1, overwrite=True, process_group=alone
                )
            torch.distributed.barrier()
        return found

    into = {"w": torch.zeros(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "manifest_at", manifest_at)
        checkpoint.load(tmp_path / NAME, model=into)
    assert into["w"].eq(2).all()
    assert len(times) > 1


def test_files_that_are_gone_when_a_load_comes_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more files than stay open, say. The load begins again; if that happens each time, it is no damage either."""
    save(tmp_path)
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 0)
    real, left = Catalog.read, [1]

    def read(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            save(tmp_path, 2.0 + left[0])
        real(*args)

    monkeypatch.setattr(Catalog, "read", read)
    assert value_at(tmp_path) == 2.0
    left[0] = 100
    with pytest.raises(checkpoint.loading.ReplacedError, match=r"was replaced by save .* while it was read"):
        value_at(tmp_path)
    assert left[0] == 100 - TRIES
    left[0] = 0
    next((tmp_path / NAME).glob("model-*")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        value_at(tmp_path)
