"""Which checkpoints go and which stay: damage, roll-backs, names that others use, deletions that are cut off."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint.run import retention
from fsdp2.checkpoint.run.folders import _is_stale
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.checkpoint.tools.cli import main
from tests.helpers.hostile_checkpoints import flip


def save(root: Path, step: int, value: float | None = None, **options: Any) -> None:
    checkpoint.save(
        root, model={"w": torch.full((500,), value if value is not None else float(step))}, step=step, **options
    )


def value_at(root: Path, step: int) -> float:
    into = {"w": torch.zeros(500)}
    checkpoint.load(root / f"step-{step:08d}", model=into)
    return float(into["w"].unique())


def steps(root: Path) -> list[int]:
    return [int(folder.rpartition("-")[2]) for folder in checkpoint.checkpoints(root)]


def saved_at(root: Path, times: dict[int, int]) -> None:
    for step, when in times.items():
        os.utime(root / f"step-{step:08d}" / MANIFEST, (when, when))


def replaced(root: Path) -> Path:
    """Step 1 was set aside, and another save has its name; the place of the old one."""
    save(root, 1)
    aside = root / ".old-step-00000001-0123456789ab"
    (root / "step-00000001").rename(aside)
    save(root / "other", 1, value=2.0)
    (root / "other" / "step-00000001").rename(root / "step-00000001")
    return aside


# --- what stays -------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_newest(tmp_path: Path) -> None:
    """The sound ones were deleted for it. It shows only when all is read."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(next((tmp_path / "step-00000003").glob("model-*")), -9)
    assert checkpoint.prune(tmp_path, keep=1, valid=checkpoint.verify) == [str(tmp_path / "step-00000001")]
    assert steps(tmp_path) == [2, 3]
    assert checkpoint.latest(tmp_path, valid=checkpoint.verify) == str(tmp_path / "step-00000002")
    save(tmp_path, 4)
    for arguments, there in ((["--keep", "2", "--verify"], [2, 3, 4]), (["--keep", "1", "--verify"], [4])):
        assert main(["prune", str(tmp_path), *arguments]) == 0
        assert steps(tmp_path) == there


@pytest.mark.parametrize(
    ("keep", "every", "there"), [(1, None, [5, 2]), (2, None, [4, 5, 1, 2]), (1, 3, [3, 5, 2])], ids=str
)
def test_what_was_saved_last_stays(keep: int, every: int | None, there: list[int], tmp_path: Path) -> None:
    """A run was rolled back to the beginning, and has saved steps 1 and 2 again. They went, since there are later
    steps."""
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    saved_at(tmp_path, {1: 1060, 2: 1070, 3: 1030, 4: 1040, 5: 1050})
    checkpoint.prune(tmp_path, keep=keep, every=every)
    assert steps(tmp_path) == sorted(there)


@pytest.mark.parametrize("when", ["put_aside", "id_at"])
def test_what_is_saved_while_it_prunes_stays(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process saves step 1 again when `prune` has made up its mind, and between any two of its steps."""
    for step in (1, 2):
        save(tmp_path, step)
    real, left = getattr(retention, when), [1]

    def meanwhile(*args: Any) -> Any:
        if left.pop() if left else False:
            save(tmp_path, 1, value=7.0, overwrite=True)
        return real(*args)

    monkeypatch.setattr(retention, when, meanwhile)
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert not left
    assert value_at(tmp_path, 1) == 7.0 and value_at(tmp_path, 2) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_latest_beside_a_save_and_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had listed the folders, and was slow; then those were gone, and it said that there is no checkpoint."""
    save(tmp_path, 1)
    real, left = retention._is_sound, [2, 3]

    def slow(folder: str, *args: Any) -> bool:
        if left:
            save(tmp_path, left.pop(0))
            for step in steps(tmp_path)[:-1]:
                shutil.rmtree(tmp_path / f"step-{step:08d}")
        return real(folder, *args)

    monkeypatch.setattr(retention, "_is_sound", slow)
    assert checkpoint.latest(tmp_path) == str(tmp_path / "step-00000003")
    shutil.rmtree(tmp_path / "step-00000003")
    assert checkpoint.latest(tmp_path) is None


def test_latest_beside_saves_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the only checkpoint was replaced again whenever it was opened, until `latest` gave up: it said
    that there is none."""
    save(tmp_path, 1)
    real, left = retention._is_sound, [1, 2]

    def overtaken(folder: str, *args: Any) -> bool:
        if left:
            left.pop()
            save(tmp_path, 1, overwrite=True)
            return False
        return real(folder, *args)

    monkeypatch.setattr(retention, "_is_sound", overtaken)
    assert checkpoint.latest(tmp_path) == str(tmp_path / "step-00000001")


# --- deletions that are cut off ---------------------------------------------------------------------------------------


class Died(BaseException):
    """Nothing is cleaned up after it."""


@pytest.mark.parametrize("last", range(4))
def test_killed_between_any_two_changes(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was about to delete is there or not; the next save of that name commits, the next prune goes on."""
    root, again = tmp_path / "run", tmp_path / "again"
    for step in (1, 2):
        save(root, step)
    left = [last]

    def mortal(real: Any) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            if not left[0]:
                raise Died
            left[0] -= 1
            return real(*args, **how)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        with pytest.raises(Died):
            checkpoint.prune(root, keep=1)
    assert steps(root) in ([1, 2], [2])
    if 1 in steps(root):
        assert value_at(root, 1) == 1.0
    shutil.copytree(root, again)
    checkpoint.prune(again, keep=1)
    assert steps(again) == [2]
    for path in (*again.rglob("*"), *again.iterdir()):
        os.utime(path, (1, 1))
    swept_some_day = {name for name in os.listdir(again) if _is_stale(LocalStorage(), str(again), name)}
    assert {*os.listdir(again)} - swept_some_day == {"step-00000002"}
    save(root, 1, value=3.0, overwrite=True)
    assert value_at(root, 1) == 3.0
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


def test_what_was_replaced_goes_only_for_a_whole_successor(tmp_path: Path) -> None:
    """Its manifest alone was looked at."""
    aside = replaced(tmp_path)
    next((tmp_path / "step-00000001").glob("model-*")).unlink()
    for path in (*aside.iterdir(), aside):
        os.utime(path, (1, 1))
    save(tmp_path, 2)
    assert aside.exists()


def test_what_a_pruned_one_replaced_goes_with_it(tmp_path: Path) -> None:
    """Otherwise the older save would be found under that name again."""
    replaced(tmp_path)
    saved_at(tmp_path, {1: 1})
    save(tmp_path, 2)
    assert [Path(folder).name for folder in checkpoint.prune(tmp_path, keep=1)] == ["step-00000001"]
    assert steps(tmp_path) == [2] and sorted(os.listdir(tmp_path)) == ["other", "step-00000002"]


def test_a_link_to_a_checkpoint_goes_alone(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 1)
    (tmp_path / "step-00000001").symlink_to(tmp_path / "elsewhere" / "step-00000001")
    saved_at(tmp_path / "elsewhere", {1: 1})
    save(tmp_path, 2)
    assert [Path(folder).name for folder in checkpoint.prune(tmp_path, keep=1)] == ["step-00000001"]
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step-00000002"]
    assert value_at(tmp_path / "elsewhere", 1) == 1.0


def test_a_save_that_fails_keeps_the_one_that_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is to replace lacks a file, so what was set aside before that is the only sound one until it counts."""
    aside = replaced(tmp_path)
    next((tmp_path / "step-00000001").glob("model-*")).unlink()
    real = LocalStorage.rename_folder

    def fails(self: LocalStorage, folder: str, to: str, durably: bool = True) -> None:
        if "/.tmp-" in folder and to.endswith("/step-00000001"):
            raise OSError(5, "Input/output error")
        real(self, folder, to, durably)

    monkeypatch.setattr(LocalStorage, "rename_folder", fails)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 1, value=3.0, overwrite=True)
    assert aside.exists()


def test_another_save_that_was_set_aside_meanwhile_stays(tmp_path: Path) -> None:
    """A third process replaced the checkpoint meanwhile, and was killed between its renames."""
    save(tmp_path, 1)
    aside = tmp_path / ".old-step-00000001-0123456789ab"
    (tmp_path / "step-00000001").rename(aside)
    retention._pruned(LocalStorage(), str(tmp_path / "step-00000001"), "ffffffffffff")
    assert steps(tmp_path) == [1] and value_at(tmp_path, 1) == 1.0
