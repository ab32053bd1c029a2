"""The moment in which a save begins to count: what was there before stays loadable, and so does what counts already."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import checkpoint
from fsdp2.checkpoint.run.folders import delete, replace_folder, sweep
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage import local
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import CheckpointError
from tests.helpers.ranks import on_ranks

pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem

from fsdp2.checkpoint.storage.remote import RemoteStorage
from tests.helpers.object_store import Bucket, bucket

NONCES = ["000000000000", "ffffffffffff"]  # of names that come before and after all others


@pytest.fixture(autouse=True)
def fresh_stores() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    Bucket.before_put.clear()


def save(folder: str | Path, value: float, **options: Any) -> None:
    checkpoint.save(folder, model={"w": torch.full((3,), value)}, **options)


def value_at(folder: str | Path) -> float:
    into = {"w": torch.zeros(3)}
    checkpoint.load(folder, model=into)
    return float(into["w"][0])


# --- storages that cannot rename: the manifest may be there though its writer was told that it is not ----------------


def lose_the_answer(patch: pytest.MonkeyPatch, arrives: bool = True, blind: bool = True) -> None:
    """The upload of the manifest times out, whether or not it arrives; then, if blind, nothing can be looked at."""
    write_all, open_file = RemoteStorage.write_all, RemoteStorage.open_file
    lost = []

    def timing_out(self: RemoteStorage, path: str, content: bytes, new: bool = False) -> None:
        if not path.endswith(MANIFEST):
            return write_all(self, path, content, new)
        if arrives:
            write_all(self, path, content, new)
        lost.append(path)
        raise OSError(110, "timed out", path)

    def unreachable(self: RemoteStorage, path: str) -> Any:
        if path.endswith(MANIFEST) and blind:  # also on a rank that did not write it
            raise OSError(110, "timed out", path)
        return open_file(self, path)

    patch.setattr(RemoteStorage, "write_all", timing_out)
    patch.setattr(RemoteStorage, "open_file", unreachable)


@on_ranks(1, 2)
def test_a_manifest_whose_answer_was_lost_keeps_its_files(rank: int, world_size: int, tmp_path: Path) -> None:
    """No rank may delete its own: neither the one that wrote the manifest, nor those that learn of its error."""
    run = f"{bucket(tmp_path)}/run"
    with pytest.MonkeyPatch.context() as patch:
        lose_the_answer(patch)
        with pytest.raises((OSError, CheckpointError), match="timed out"):
            save(run, 1.0, extra={"own": torch.full((3,), rank)}, step=1)
        dist.barrier()
    newest = checkpoint.latest(run)
    assert newest == f"{run}/step-00000001"
    assert value_at(newest) == 1.0
    assert checkpoint.load(newest).extra["own"].tolist() == [rank] * 3


def test_a_manifest_that_may_come_yet_keeps_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there, which is no proof: the request may still be on its way. The next save takes the place."""
    with monkeypatch.context() as patch:
        lose_the_answer(patch, arrives=False, blind=False)
        with pytest.raises(OSError, match="timed out"):
            save("memory://run", 1.0, step=1)
    storage = RemoteStorage("memory://run")
    assert len(storage.names("memory://run/step-00000001")) == 2  # with the mark that a save has begun
    assert checkpoint.latest("memory://run") is None
    save("memory://run", 2.0, step=1)
    assert len(storage.names("memory://run/step-00000001")) == 2
    assert value_at("memory://run/step-00000001") == 2.0


# --- replacing a checkpoint -------------------------------------------------------------------------------------------


def set_aside(path: Path, nonce: str, changed: float | None = None) -> Path:
    """As a save leaves it that was killed while it replaced `path`."""
    old = path.parent / f".old-{path.name}-{nonce}"
    path.rename(old)
    if changed is not None:
        os.utime(old / MANIFEST, (changed, changed))
    return old


@on_ranks(1, 2)
def test_a_checkpoint_that_was_set_aside_is_not_replaced_unasked(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    save(tmp_path, 1.0, step=1)
    dist.barrier()
    if rank == 0:
        set_aside(path, NONCES[0])
    dist.barrier()
    assert checkpoint.latest(tmp_path) == str(path)
    with pytest.raises(CheckpointError, match=r"is a checkpoint already \(it is in .*\.old-step-00000001-0{12}"):
        save(tmp_path, 2.0, step=1)
    dist.barrier()
    assert value_at(path) == 1.0
    save(tmp_path, 2.0, step=1, overwrite=True)
    dist.barrier()  # the rank that finishes the save is also the one that cleans up
    assert value_at(path) == 2.0
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("nonces", [NONCES, NONCES[::-1]], ids=["older first", "newer first"])
def test_of_two_that_were_set_aside_the_newer_counts(nonces: list[str], tmp_path: Path) -> None:
    """Whatever they are called, and whatever a user has put beside the files of the older one since."""
    for value, nonce in zip((1.0, 2.0), nonces, strict=True):
        save(tmp_path / str(value) / "a", value)
        old = set_aside(tmp_path / str(value) / "a", nonce, changed=1e9 + value)
        old.rename(tmp_path / old.name)
    (tmp_path / f".old-a-{nonces[0]}" / "notes.txt").write_text("mine")
    assert value_at(tmp_path / "a") == 2.0


class Died(BaseException):
    """Nothing is cleaned up after it."""


class Mortal(LocalStorage):
    """A storage whose process dies before its change number `last`."""

    def __init__(self, last: int) -> None:
        self.changes = 0
        self._last = last

    def rename_folder(self, folder: str, to: str, durably: bool = True) -> None:
        self._note()
        super().rename_folder(folder, to, durably)

    def remove(self, path: str) -> None:
        self._note()
        super().remove(path)

    def _note(self) -> None:
        if self.changes == self._last:
            raise Died
        self.changes += 1


@pytest.mark.parametrize("stale", [NONCES, NONCES[:1], NONCES[1:], []], ids=["both", "before", "after", "none"])
def test_killed_while_replacing_beside_older_ones(stale: list[str], tmp_path: Path) -> None:
    """1 was set aside long ago, 2 is there, 3 takes its place: at no moment is 1 found, even if 2's clock was wrong."""
    base = tmp_path / "base"
    for nonce in stale:
        save(base / "a", 1.0)
        set_aside(base / "a", nonce).rename(tmp_path / nonce)
    save(base / "a", 2.0)
    os.utime(base / "a" / MANIFEST, (1, 1))
    save(tmp_path / "new", 3.0)
    for nonce in stale:
        (tmp_path / nonce).rename(base / f".old-a-{nonce}")
    (tmp_path / "new").rename(base / ".tmp-a-888888888888")
    found = []
    for last in range(100):
        root = shutil.copytree(base, tmp_path / str(last))
        storage = Mortal(last)
        try:
            replace_folder(storage, str(root / ".tmp-a-888888888888"), str(root / "a"), overwrite=True)
            delete(storage, sweep(storage, str(root / "a"), ()))
        except Died:
            found.append(value_at(root / "a"))
            continue
        assert os.listdir(root) == ["a"]
        break
    assert value_at(root / "a") == 3.0
    assert found == sorted(found) and {*found} == {2.0, 3.0}
    assert found.count(2.0) == len(stale) + 2


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_file_system_that_does_not_tell_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE without statfs reports zeros."""
    zeros = SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=512, f_bsize=512)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: zeros)
    save(tmp_path / "a", 1.0)
    assert value_at(tmp_path / "a") == 1.0
    zeros.f_blocks = 1000
    with pytest.raises(OSError, match="bytes are needed, 0 are free"):
        save(tmp_path / "b", 1.0)


def unreadable(patch: pytest.MonkeyPatch, *files: Path) -> None:
    """Their blocks are bad."""
    real, bad = os.preadv, {file.stat().st_ino for file in files}

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino in bad:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    patch.setattr(os, "preadv", preadv)


def test_the_newest_that_the_disk_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, float(step), step=step)
    unreadable(monkeypatch, tmp_path / "step-00000003" / MANIFEST)
    with pytest.warns(UserWarning, match=r"step-00000003: cannot be read .*Input/output error.* the checkpoint before"):
        assert checkpoint.latest(tmp_path) == str(tmp_path / "step-00000002")
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.prune(tmp_path, keep=1)  # it deletes: only what it knows
    assert len(checkpoint.checkpoints(tmp_path)) == 3
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / MANIFEST).write_bytes(b"damaged")
    # Not "there is none": the run would begin again, and its checkpoints are there.
    with pytest.warns(UserWarning, match="step-00000003"), pytest.raises(OSError, match="Input/output error"):
        checkpoint.latest(tmp_path)


@on_ranks(2)
def test_a_disk_that_fails_right_after_the_rename(rank: int, world_size: int, tmp_path: Path) -> None:
    """One rank raised, and the other told of a checkpoint that is durable, and went on."""
    sync = local._sync_folder

    def failing(folder: Any) -> None:
        if str(folder) == str(tmp_path) and (tmp_path / "a").exists():
            raise OSError(5, "Input/output error", str(folder))
        sync(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_sync_folder", failing)
        with pytest.raises((OSError, CheckpointError), match=f"Input/output error.*{tmp_path.name}"):
            save(tmp_path / "a", 1.0)
        dist.barrier()
    assert value_at(tmp_path / "a") == 1.0
    save(tmp_path / "b", 2.0)
    assert value_at(tmp_path / "b") == 2.0


def test_errors_of_the_disk_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "[Errno 5] Input/output error", on a machine with a thousand files."""
    save(tmp_path / "a", 1.0)
    unreadable(monkeypatch, *tmp_path.glob("a/*.safetensors"))
    with pytest.raises(OSError, match=r"Input/output error: '.*model-rank-00000-of-00001\.safetensors'"):
        value_at(tmp_path / "a")
