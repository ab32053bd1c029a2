"""Whole checkpoints behind URLs: where folders cannot be renamed, and files are written from first to last byte.

The storages: fsspec's memory; `Disk`, a file system with folders; `Bucket`, an object store
(`tests/helpers/object_store.py`).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2.checkpoint import RandomState, checkpoints, convert, describe, latest, load, prune, save, verify
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.checkpoint.storage.remote import RemoteStorage
from fsdp2.errors import ArgumentError, CheckpointError, UnsupportedError
from tests.helpers.ranks import on_ranks

pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.object_store import Bucket, bucket


@pytest.fixture(autouse=True)
def fresh_stores() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Bucket.puts.clear()
    yield
    Bucket.before_put.clear()


# --- URLs -------------------------------------------------------------------------------------------------------------


def test_urls_that_are_refused() -> None:
    for url in ("simplecache::s3://bucket/x", "s3://bucket/run*"):
        with pytest.raises(ArgumentError, match=url.split("/")[0].rstrip(":")):
            RemoteStorage(url)
    with pytest.raises(UnsupportedError, match=r"sftp://host/x: expected a local folder, or one of abfs,.* s3"):
        RemoteStorage("sftp://host/x")


def test_which_storage_a_name_means(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a", f"local://{tmp_path}/a/"):
        storage, path = storage_of(url)
        assert isinstance(storage, LocalStorage) and path == f"{tmp_path}/a"
    storage, path = storage_of("s3://bucket/a/")
    assert isinstance(storage, RemoteStorage) and path == "s3://bucket/a"
    with pytest.raises(ArgumentError, match=r"s3:/bucket/a: .*pathlib"):
        storage_of(Path("s3://bucket/a"))


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedError, match=r"memory://run: .* pip install 'fsdp2\[remote\]'"):
        save("memory://run", model={"w": torch.ones(2)})


def test_errors_of_clients_become_os_errors(tmp_path: Path) -> None:
    """gcsfs raises `HttpError`, a mere `Exception`, which a save or sweep that expects `OSError` does not."""
    storage = RemoteStorage(bucket(tmp_path))
    path = storage.join(storage.root, "forbidden")
    calls: list[Callable[[], object]] = [
        lambda: storage.upload(path, lambda: [memoryview(b"1")]),
        lambda: storage.write_all(path, b"1"),
        lambda: storage.remove(path),
    ]
    for call in calls:
        with pytest.raises(OSError, match="forbidden: RuntimeError: 403"):
            call()
    with pytest.raises(CheckpointError, match=r"forbidden: cannot be opened .*403"):
        storage.open_file(path)


# --- whole checkpoints ------------------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    result = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        result |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[param].items()}
    return result


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_a_run_in_one_process(kind: str, tmp_path: Path) -> None:
    run = {"memory": "memory://runs/a/", "bucket": f"{bucket(tmp_path)}/a"}[kind]
    torch.manual_seed(0)
    model, optimizer = trained()
    for step in (1, 2, 3):
        save(run, model=model, optimizer=optimizer, step=step, extra={"random": RandomState(), "x": torch.arange(3)})
    expected = values(model, optimizer)
    base = run.rstrip("/")
    assert checkpoints(run) == [f"{base}/step-0000000{step}" for step in (1, 2, 3)]
    assert prune(run, keep=1, every=2) == [f"{base}/step-00000001"]
    assert checkpoints(run) == [f"{base}/step-00000002", f"{base}/step-00000003"]

    drawn = torch.rand(3)
    other, its_optimizer = trained()
    folder = latest(run)
    assert folder is not None
    loaded = load(folder, model=other, optimizer=its_optimizer, extra={"random": RandomState()})
    assert torch.equal(torch.rand(3), drawn)
    assert_same(values(other, its_optimizer), expected)
    assert (loaded.step, loaded.folder) == (3, folder)
    assert torch.equal(loaded.extra["x"], torch.arange(3))


@on_ranks(2)
def test_a_file_system_that_is_not_shared(rank: int, world_size: int) -> None:
    """Every process has a memory of its own; without a look at all files this would be "saved", and half of it lost."""
    with pytest.raises(CheckpointError, match="All ranks must save to one shared folder"):
        save("memory://run", model={"w": torch.ones(2)}, extra={"rank": rank})
    assert latest("memory://") is None


def test_what_is_refused(tmp_path: Path) -> None:
    run, model = bucket(tmp_path), {"w": torch.ones(2)}
    with pytest.raises(ArgumentError, match="consolidated=True needs a file system on which all ranks may write"):
        save(run, model=model, step=1, consolidated=True)
    save(run, model=model, step=1)
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        save(run, model=model, step=1)
    with pytest.raises(CheckpointError, match="cannot replace it atomically"):
        save(run, model=model, step=1, overwrite=True)
    with pytest.raises(CheckpointError, match="step-00000002: there is no checkpoint"):
        load(f"{run}/step-00000002", model=model)
    with pytest.raises(CheckpointError, match=r"is the folder of a run, with step-00000001"):
        load(run, model=model)
    with pytest.raises(OSError, match="forbidden"):
        save(f"{run}/forbidden", model=model)


def test_a_request_that_fails_is_sent_again(tmp_path: Path) -> None:
    """One of many was not answered, and a save of an hour had failed. (With the real client: test_slow_remote.py)"""
    failed: set[str] = set()

    def fails_once(key: str) -> None:
        if key not in failed:
            failed.add(key)
            raise ConnectionError("reset by peer")

    Bucket.before_put.append(fails_once)
    save(bucket(tmp_path), model={"w": torch.ones(2)}, step=1)
    assert {*Bucket.puts} == failed
    load(latest(bucket(tmp_path)) or "", model={"w": torch.zeros(2)})


def test_files_stay_for_the_next_try_if_an_upload_failed(tmp_path: Path) -> None:
    """They were deleted, and sent again: hours on a slow link."""
    run = bucket(tmp_path)
    model, optimizer = trained()

    def fail(key: str) -> None:
        if "optimizer" in key:
            raise OSError("no room")

    Bucket.before_put.append(fail)
    with pytest.raises(OSError, match="no room"):
        save(run, model=model, optimizer=optimizer, step=1)
    (sent,) = (name for name in names_in(run, 1) if name.startswith("model-rank-"))
    Bucket.before_put.clear()
    Bucket.puts.clear()
    save(run, model=model, optimizer=optimizer, step=1)
    assert f"step-00000001/{sent}" not in Bucket.puts
    assert sent in describe(f"{run}/step-00000001").files


def names_in(run: str, step: int) -> list[str]:
    return RemoteStorage(run).names(f"{run}/step-0000000{step}")


def test_what_a_killed_save_left_of_other_values_is_not_used(tmp_path: Path) -> None:
    """The run went another way before it came to that step again."""
    run = bucket(tmp_path)

    def dies(key: str) -> None:
        if MANIFEST in key:
            raise PermissionError("killed")

    Bucket.before_put.append(dies)
    for value in (1.0, 2.0):
        with pytest.raises(PermissionError):
            save(run, model={"w": torch.full((9,), value), "v": torch.ones(3)}, step=1)
    Bucket.before_put.clear()
    save(run, model={"w": torch.full((9,), 2.0), "v": torch.ones(3)}, step=1)
    found = {"w": torch.zeros(9), "v": torch.zeros(3)}
    load(latest(run) or "", model=found)
    assert found["w"].eq(2).all()
    assert len(names_in(run, 1)) == 2  # with the manifest


def test_files_of_a_dead_save_with_other_ranks_go(tmp_path: Path) -> None:
    """The manifest does not list them, so nobody reads them; but who would delete them? What is not ours stays."""
    run = bucket(tmp_path)
    storage = RemoteStorage(run)
    folder = f"{run}/step-00000001"
    storage.make_folder(folder)
    dead = ["model-rank-00003-of-00004.safetensors", "extra-rank-00001-of-00004.safetensors"]
    for name in (*dead, "tokenizer.json"):
        storage.write_all(f"{folder}/{name}", b"left over")
    save(run, model={"w": torch.ones(2)}, step=1)
    left = storage.names(folder)
    assert len(left) == 3 and not {*dead} & {*left} and {MANIFEST, "tokenizer.json"} < {*left}
    load(folder, model={"w": torch.ones(2)})


@contextmanager
def hanging(at: str, work: Callable[[], object], fails: bool = False) -> Iterator[list[Exception]]:
    """In another thread, work whose first upload of such a file hangs until the block is left, and may fail then; the
    errors of that work."""
    hangs, goes_on = threading.Event(), threading.Event()
    held: list[str] = []
    errors: list[Exception] = []

    def hold(key: str) -> None:
        if at in key and (not held or (fails and key in held)):
            held.append(key)
            hangs.set()
            goes_on.wait()
            if fails:
                raise OSError("timed out")

    def run() -> None:
        try:
            work()
        except (CheckpointError, OSError) as error:
            errors.append(error)

    Bucket.before_put.append(hold)
    thread = threading.Thread(target=run)
    thread.start()
    hangs.wait()
    yield errors
    goes_on.set()
    thread.join()


@pytest.mark.parametrize(("at", "fails"), [("optimizer", True), ("optimizer", False), (MANIFEST, False)])
def test_a_late_save_does_not_spoil_the_one_that_took_its_place(at: str, fails: bool, tmp_path: Path) -> None:
    """A save hangs in an upload; the run is started anew, and saves that step; then the first one moves again. If both
    had seen that there was no manifest, nothing was left of either."""
    run = bucket(tmp_path)
    late, later = trained(), trained()
    with hanging(at, lambda: save(run, model=late[0], optimizer=late[1], step=1), fails) as errors:
        save(run, model=later[0], optimizer=later[1], step=1)
    assert errors and (at != MANIFEST or "another save has completed a checkpoint there" in str(errors))
    found = trained()
    load(latest(run) or "", model=found[0], optimizer=found[1])
    assert_same(values(*found), values(*later))


@pytest.mark.parametrize("at", ["model", MANIFEST])
def test_a_save_that_comes_first_to_where_a_conversion_writes(at: str, tmp_path: Path) -> None:
    """A conversion writes to a URL, and a job saves there meanwhile. The conversion took its place without a word."""
    save(tmp_path / "source", model={"w": torch.ones(2)})
    (tmp_path / "bucket").mkdir()
    target = f"{bucket(tmp_path / 'bucket')}/step-00000001"

    def comes_first(key: str) -> None:
        if at in key:
            Bucket.before_put.clear()
            save(target, model={"w": torch.full((2,), 2.0)})

    Bucket.before_put.append(comes_first)
    with pytest.raises(CheckpointError, match=r"another save has .* there in the meantime"):
        convert(tmp_path / "source", target)
    found = {"w": torch.zeros(2)}
    load(target, model=found)
    assert found["w"].eq(2).all()
    verify(target)


def test_a_conversion_takes_no_name_of_a_users_file(tmp_path: Path) -> None:
    """Consolidated files have the names that everybody's have. One that was there was overwritten."""
    save(tmp_path / "source", model={"w": torch.ones(2)})
    RemoteStorage("memory://hf").write_all("memory://hf/model.safetensors", b"theirs")
    with pytest.raises(CheckpointError, match=r"hf: has files in it; convert to another folder"):
        convert(tmp_path / "source", "memory://hf")
    assert MemoryFileSystem().cat("/hf/model.safetensors") == b"theirs"
    verify(convert(tmp_path / "source", "memory://other"))
