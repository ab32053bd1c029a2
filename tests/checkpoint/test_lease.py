"""Who saves to a name: the lease beside the folder, who is told of it, and when it is taken over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint.io import reading
from fsdp2.checkpoint.io.reading import Filler
from fsdp2.checkpoint.run import committing, lease
from fsdp2.checkpoint.run.lease import is_leased, take_lease
from fsdp2.checkpoint.storage import local
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import CheckpointError, ReplacedError
from tests.helpers.ranks import on_ranks

NAME = "step-00000001"
FILE = f".lease-{NAME}"
DISK = LocalStorage()
EXHAUSTIVE = pytest.mark.exhaustive


def save(root: Path, value: float = 1.0, **options: Any) -> checkpoint.SaveHandle:
    return checkpoint.save(root, model={"w": torch.full((3,), value)}, step=1, overwrite=True, **options)


def value_at(root: Path) -> float:
    into = {"w": torch.zeros(3)}
    checkpoint.load(root / NAME, model=into)
    return float(into["w"][0])


def write_lease(root: Path, age_s: float, **holder: Any) -> None:
    """The lease of somebody on another host."""
    known = {"id": "0123456789ab", "host": "node7", "place": "node7 boot", "pid": 42, "job": "4711", "since": 0.0}
    (root / FILE).write_text(json.dumps({**known, **holder}) if holder.get("id") != "" else "")
    os.utime(root / FILE, (time.time() - age_s,) * 2)


def test_the_second_job_is_told_who_saves(tmp_path: Path) -> None:
    save(tmp_path)
    held = take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
    with pytest.raises(
        CheckpointError, match=rf"is being saved by process {os.getpid()} on .* stop one, or save to an"
    ):
        save(tmp_path, 2.0)
    assert value_at(tmp_path) == 1.0
    held.release()
    held.release()
    save(tmp_path, 2.0)
    assert value_at(tmp_path) == 2.0
    assert os.listdir(tmp_path) == [NAME]


@on_ranks(2)
def test_all_ranks_are_told(rank: int, world_size: int, tmp_path: Path) -> None:
    save(tmp_path)
    held = take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5) if rank == 1 else None
    torch.distributed.barrier()
    with pytest.raises((CheckpointError, OSError), match=r"is being saved by process|No such file"):
        save(tmp_path, 2.0, timeout_s=20)
    torch.distributed.barrier()
    if held is not None:
        held.release()
    torch.distributed.barrier()
    assert value_at(tmp_path) == 1.0
    save(tmp_path, 3.0)
    assert value_at(tmp_path) == 3.0


def test_the_lease_ends_before_the_other_ranks_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank to report commits. The one that took the lease may be another and release it much later; the first
    to continue may save to this name again."""
    release = lease.Lease.release
    held: list[lease.Lease] = []
    monkeypatch.setattr(lease.Lease, "release", lambda self: held.append(self))
    for value in (1.0, 2.0):
        save(tmp_path, value, timeout_s=5)
        assert os.listdir(tmp_path) == [NAME]
    assert value_at(tmp_path) == 2.0
    for each in held:
        release(each)


def test_a_lease_in_the_background_lasts_as_long_as_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), committing.commit

    def commit(*args: Any) -> None:
        goes_on.wait()
        real(*args)

    monkeypatch.setattr("fsdp2.checkpoint.saving.commit", commit)
    handle = save(tmp_path, async_op=True)
    assert is_leased(DISK, str(tmp_path / NAME))
    goes_on.set()
    handle.wait()
    assert not is_leased(DISK, str(tmp_path / NAME))
    assert os.listdir(tmp_path) == [NAME]


def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    """Killed by its scheduler, say, and started anew on the same host."""
    save(tmp_path)
    child = os.fork()
    if not child:
        take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and not buried: its number is still taken
    assert FILE in os.listdir(tmp_path)
    save(tmp_path, 2.0)
    os.waitpid(child, 0)
    assert value_at(tmp_path) == 2.0
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("holder", [{}, {"id": ""}, {"unknown": 1}], ids=["another host", "empty", "later version"])
def test_what_cannot_be_known_counts_until_it_expires(holder: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    write_lease(tmp_path, age_s=1, **holder)
    start = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"process 42 on node7 of job 4711" if not holder else "is being saved by"
    ):
        save(tmp_path, 2.0, timeout_s=0.3)
    assert time.monotonic() - start < 20
    assert value_at(tmp_path) == 1.0
    write_lease(tmp_path, age_s=lease.LEASE_S + 5, **holder)
    save(tmp_path, 2.0, timeout_s=5)
    assert value_at(tmp_path) == 2.0
    assert os.listdir(tmp_path) == [NAME]


def test_a_lease_that_is_renewed_counts(tmp_path: Path) -> None:
    """However old it looked: a job on another host that was only slow."""
    write_lease(tmp_path, age_s=lease.LEASE_S - 5)
    timer = threading.Timer(0.2, os.utime, [tmp_path / FILE])
    timer.start()
    with pytest.raises(CheckpointError, match="process 42 on node7"):
        save(tmp_path, timeout_s=30)
    timer.join()


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never one that has taken its place."""
    monkeypatch.setattr(lease, "RENEW_S", 0.02)
    monkeypatch.setattr(lease, "_renewer", lease._Renewer())
    held = take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
    os.utime(tmp_path / FILE, (1, 1))
    deadline = time.monotonic() + 20
    while (tmp_path / FILE).stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / FILE).stat().st_mtime > 1
    (tmp_path / FILE).unlink()
    write_lease(tmp_path, age_s=100)
    before = (tmp_path / FILE).stat().st_mtime
    time.sleep(0.1)
    held.release()
    assert (tmp_path / FILE).stat().st_mtime == before  # still there, and as it was


def test_a_save_whose_lease_was_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still for minutes, and another took its place: it does not put its older values over those."""
    save(tmp_path)
    real = committing.check_lease

    def stands_still(storage: Any, path: str, save_id: str) -> None:
        (tmp_path / FILE).unlink()
        write_lease(tmp_path, age_s=0)
        real(storage, path, save_id)

    with monkeypatch.context() as patch:
        patch.setattr(committing, "check_lease", stands_still)
        with pytest.raises(CheckpointError, match=r"taken over by process 42 on node7 of job 4711"):
            save(tmp_path, 2.0)
    assert (tmp_path / FILE).exists()
    assert value_at(tmp_path) == 1.0
    (tmp_path / FILE).unlink()
    save(tmp_path, 3.0)
    assert os.listdir(tmp_path) == [NAME]


class Stopping:
    """Calls `meanwhile` before one of the calls that look at a folder or change it, as if this process had been stopped
    there for minutes while it had the lease: that is old by then. The other one is on another host."""

    NAMES = ("rename", "replace", "link", "unlink", "mkdir", "fsync", "listdir", "scandir")

    def __init__(self, root: Path, last: int, meanwhile: Callable[[], object], patch: pytest.MonkeyPatch):
        self.file, self.last, self.meanwhile = root / FILE, last, meanwhile
        self.calls, self.has_begun, self.host = 0, False, "node1"
        patch.setattr(lease, "machine", lambda: self.host)
        for name in self.NAMES:
            patch.setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            self.has_begun = self.has_begun or self.file.exists()
            self.calls += self.has_begun and self.host == "node1"
            if self.calls == self.last and self.host == "node1":
                if self.file.exists():
                    os.utime(self.file, (1, 1))
                self.host = "node2"
                self.meanwhile()
                self.host, self.last = "node1", 0
            return real(*args, **how)

        return call


@pytest.mark.parametrize(
    ("there_before", "every"), [(True, 3), *(pytest.param(before, 1, marks=EXHAUSTIVE) for before in (True, False))]
)
def test_stopped_anywhere_while_another_takes_over_and_saves(there_before: bool, every: int, tmp_path: Path) -> None:
    """What the other has saved stays: it came later. A save that was stopped after its check of the lease put its older
    values over those, or left them under another name."""
    for last in range(1, 100, every):
        root = tmp_path / str(last)
        root.mkdir()
        if there_before:
            save(root, 0.0)
        outcome: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            stopping = Stopping(root, last, lambda root=root: save(root, 2.0, timeout_s=1), patch)
            try:
                save(root, 1.0)
            except (CheckpointError, FileNotFoundError) as error:
                outcome.append(str(error))
        if stopping.last:
            break
        assert value_at(root) == 2.0, f"stopped at {last}: {outcome}"
        assert (root / NAME).is_dir() and not list(root.glob(".old-*")), f"stopped at {last}: {outcome}"
    assert last > 12


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=EXHAUSTIVE)])
def test_stopped_anywhere_while_another_takes_over_and_is_saving(every: int, tmp_path: Path) -> None:
    """The one that goes on takes nothing of it away. It deleted what it took for left-overs of its own name, and the
    other failed: "All ranks must save to one shared folder"."""
    for last in range(1, 100, every):
        root = tmp_path / str(last)
        save(root, 0.0)
        begun = root / f".tmp-{NAME}-0123456789ab"
        held: list[lease.Lease] = []

        def begin(root: Path = root, begun: Path = begun, held: list[lease.Lease] = held) -> None:
            held.append(take_lease(DISK, str(root / NAME), "0123456789ab", 1))
            begun.mkdir()
            (begun / "model-rank-00000-of-00001.safetensors").write_text("half of it")

        with pytest.MonkeyPatch.context() as patch:
            stopping = Stopping(root, last, begin, patch)
            with suppress(CheckpointError, FileNotFoundError):
                save(root, 1.0)
        if stopping.last:
            break
        for each in held:
            assert os.listdir(begun), f"stopped at {last}"
            each.release()
        assert value_at(root) in (0.0, 1.0)
    assert last > 12


def test_a_lease_that_has_ended_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has come, saved, and gone."""
    real = committing.check_lease

    def stands_still(storage: Any, path: str, save_id: str) -> None:
        (tmp_path / FILE).unlink()
        real(storage, path, save_id)

    monkeypatch.setattr(committing, "check_lease", stands_still)
    with pytest.raises(CheckpointError, match="taken over by one that has ended"):
        save(tmp_path)


def test_of_two_that_clear_a_dead_lease_the_second_takes_no_live_one(tmp_path: Path) -> None:
    write_lease(tmp_path, age_s=100)
    dead = lease._look(str(tmp_path / FILE))
    assert dead is not None
    lease._clear(str(tmp_path / FILE), dead)
    held = take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
    lease._clear(str(tmp_path / FILE), dead)
    assert is_leased(DISK, str(tmp_path / NAME))
    held.release()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: Any, **how: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    held = take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
    assert os.listdir(tmp_path) == [FILE]
    with pytest.raises(CheckpointError, match="is being saved by"):
        save(tmp_path)
    held.release()
    save(tmp_path)
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("calls", range(6))
def test_killed_while_it_takes_a_lease(calls: int, tmp_path: Path) -> None:
    """Before each call that changes files: the next save commits, and nothing stays."""
    save(tmp_path)
    child = os.fork()
    if not child:
        left = iter(range(calls))

        def counted(real: Any) -> Any:
            return lambda *args, **how: (
                real(*args, **how) if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL)
            )

        for name in ("open", "write", "link", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        take_lease(DISK, str(tmp_path / NAME), "0123456789ab", 5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    save(tmp_path, 2.0)
    assert value_at(tmp_path) == 2.0
    assert os.listdir(tmp_path) == [NAME]


# --- readers beside a writer ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_all_ranks_read_again_if_one_must(rank: int, world_size: int, tmp_path: Path) -> None:
    """Another job replaces the checkpoint when both have read its manifest, and rank 1 comes to files that are gone."""
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    save(tmp_path)
    torch.distributed.barrier()
    real, times = LocalStorage.pinned, []

    def pinned(self: LocalStorage, folder: str) -> Any:
        found = real(self, folder)
        times.append(folder)
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
        patch.setattr(LocalStorage, "pinned", pinned)
        checkpoint.load(tmp_path / NAME, model=into)
    assert into["w"].eq(2).all()
    assert len(times) > 1


def test_files_that_are_gone_when_a_load_comes_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more files than stay open, say. The load begins again; if that happens each time, it is no damage either."""
    save(tmp_path)
    monkeypatch.setattr(local, "KEPT_OPEN", 0)
    real, left = checkpoint.loading.read_all, [1]

    def read_all(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            save(tmp_path, 2.0 + left[0])
        real(*args)

    monkeypatch.setattr(checkpoint.loading, "read_all", read_all)
    assert value_at(tmp_path) == 2.0
    left[0] = 100
    with pytest.raises(checkpoint.loading.ReplacedError, match=r"was replaced by save .* while it was read"):
        value_at(tmp_path)
    assert left[0] == 97
    left[0] = 0
    next((tmp_path / NAME).glob("model-*")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        value_at(tmp_path)


@on_ranks(1, 3)
def test_load_from_rank_beside_a_writer(rank: int, world_size: int, tmp_path: Path) -> None:
    """The reader's files are replaced when it comes to them, after the others had parts of what was there before. It
    raised, where `load` begins again."""
    alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
    reader = world_size - 1

    def save_alone(value: float) -> None:
        model = {"a": torch.full((3,), value), "b": torch.full((4,), value)}
        checkpoint.save(tmp_path, model=model, step=1, overwrite=True, process_group=alone)

    if rank == reader:
        save_alone(1.0)
    into = {"a": torch.zeros(3), "b": torch.zeros(4)}
    real, left, reads = Filler.fill, [1], [0]

    def fill(self: Filler, requests: Any) -> None:
        reads[0] += 1
        if reads[0] % 2 == 0 and left[0]:  # of each two tensors the second
            left[0] -= 1
            save_alone(2.0 + left[0])
        real(self, requests)

    folder = tmp_path / NAME if rank == reader else Path("/nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "KEPT_OPEN", 0)
        patch.setattr(reading, "MAX_OPEN_FILES", 0)
        patch.setattr(Filler, "fill", fill)
        checkpoint.load_from_rank(folder, model=into, rank=reader)
        assert all(values.eq(2).all() for values in into.values())
        assert reads[0] == (4 if rank == reader else 0)
        left[0] = 100
        with pytest.raises(ReplacedError, match=r"was replaced by save .* while it was read"):
            checkpoint.load_from_rank(folder, model=into, rank=reader)
        assert left[0] == (97 if rank == reader else 100)
        left[0] = 0
        checkpoint.load_from_rank(folder, model=into, rank=reader)
    if rank == reader:
        for file in (tmp_path / NAME).glob("model-*"):
            file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.load_from_rank(folder, model=into, rank=reader)


def test_left_overs_of_a_name_with_a_line_break(tmp_path: Path) -> None:
    """Nobody took them for what they are: what a save had set aside stayed for ever."""
    for name in ("a\nb", "ü ", "x'\"y"):
        for value in (1.0, 2.0):
            checkpoint.save(tmp_path / name, model={"w": torch.full((3,), value)}, overwrite=True)
        assert os.listdir(tmp_path) == [name]
        shutil.rmtree(tmp_path / name)
