"""Where checkpoints live: one contract for all storages.

They are a local file system, fsspec's memory, and an object store
(`tests/helpers/object_store.py`).
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2.checkpoint.io import reading
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.checkpoint.storage.remote import RemoteStorage
from fsdp2.errors import CheckpointError, CorruptError

pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.object_store import bucket

Place = tuple[Storage, str]


@pytest.fixture(params=["local", "memory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A storage, and a folder in it that is not there yet."""
    url = {"memory": "memory://runs", "bucket": f"{bucket(tmp_path)}/runs"}
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    if request.param == "local":
        return LocalStorage(), f"{tmp_path}/runs"
    storage = RemoteStorage(url[request.param])
    return storage, storage.root


def put(storage: Storage, path: str, content: bytes) -> None:
    if isinstance(storage, RemoteStorage):
        storage.upload(path, lambda: [memoryview(content)])
        return
    writer = storage.write_file(path, len(content))
    writer.write(0, [memoryview(content)])
    writer.finish()


def get(storage: Storage, path: str) -> bytes:
    reader = storage.open_file(path)
    content = bytearray(reader.size)
    reader.read_into(0, memoryview(content))
    reader.close()
    return bytes(content)


def test_folders(place: Place) -> None:
    storage, root = place
    folder = storage.join(root, "a")
    assert storage.names(folder) == []
    storage.make_folder(folder)
    storage.make_folder(folder)
    assert storage.names(folder) == []
    put(storage, storage.join(folder, "y"), b"1")
    put(storage, storage.join(folder, "x"), b"22")
    assert storage.names(folder) == ["x", "y"]
    assert storage.names(root) == ["a"]
    assert (storage.sizes(folder), storage.sizes(root)) == ({"x": 2, "y": 1}, {})
    assert storage.names(storage.join(folder, "x")) == [], "a file is no folder"
    assert storage.sizes(storage.join(folder, "x")) == storage.sizes(storage.join(folder, "z")) == {}
    kinds = [storage.kind(storage.join(folder, name)) for name in ("x", "z")]
    assert [storage.kind(folder), *kinds] == ["folder", "file", None]
    assert storage.kind(storage.join(storage.join(folder, "x"), "z")) is None, "a file has nothing in it"


@pytest.mark.parametrize("look", ["names", "sizes", "kind"])
def test_what_others_write_is_seen_at_once(place: Place, look: str) -> None:
    storage, root = place
    storage.make_folder(root)
    path = storage.join(root, "x")
    put(storage, storage.join(root, "w"), b"1")

    def seen() -> object:
        return getattr(storage, look)(path if look == "kind" else root)

    # Another process, which shares nothing with this one but the files.
    other = threading.Thread(target=lambda: put(LocalStorage() if storage.renames else RemoteStorage(root), path, b"1"))
    storage.names(root)
    before = seen()
    other.start()
    other.join()
    after = {"names": ["w", "x"], "sizes": {"w": 1, "x": 1}, "kind": "file"}
    assert before != seen() == after[look]


def test_small_files_are_whole_at_any_time(place: Place) -> None:
    """Somebody looks while a manifest is written, or the process dies there."""
    storage, root = place
    storage.make_folder(root)
    path = storage.join(root, "x")
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]
    storage.write_all(path, contents[0])
    seen: list[bytes | Exception] = []
    stop = threading.Event()

    def look() -> None:
        while len(seen) < 2 or not stop.is_set():
            try:
                seen.append(get(storage, path))
            except Exception as error:
                seen.append(error)

    looker = threading.Thread(target=look)
    looker.start()
    for turn in range(30):
        storage.write_all(path, contents[turn % 2])
    stop.set()
    looker.join()
    wrong = [len(content) if isinstance(content, bytes) else content for content in seen if content not in contents]
    assert wrong == []


def test_an_abandoned_file(place: Place, tmp_path: Path) -> None:
    """Closing it must not make an object of what was written by then."""
    storage, root = place
    storage.make_folder(root)
    path = storage.join(root, "x")
    put(storage, path, b"before")
    for written in (10, 200_000):

        def fails(size: int = written) -> Iterator[memoryview]:
            yield memoryview(bytes(size))
            raise MemoryError

        if isinstance(storage, RemoteStorage):
            with pytest.raises(MemoryError):
                storage.upload(path, fails)
            continue
        writer = storage.write_file(path, 1_000_000)
        writer.write(0, [memoryview(bytes(written))])
        writer.abandon()
        writer.abandon()
        del writer
    if root.startswith("s3"):
        assert get(storage, path) == b"before"
        assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".upload")] == []
    put(storage, path, b"after")
    assert get(storage, path) == b"after"


def test_files_that_end_too_early(place: Place) -> None:
    storage, root = place
    storage.make_folder(root)
    path = storage.join(root, "x")
    put(storage, path, bytes(100))
    reader = storage.open_file(path)
    with pytest.raises(CorruptError, match="x: ends at byte 100, 5 bytes too early"):
        reader.read_into(95, memoryview(bytearray(10)))
    with pytest.raises(CorruptError, match=r"x: ends at byte \d+, \d+ bytes too early"):
        reader.read_into(200, memoryview(bytearray(10)))
    put(storage, path, bytes(50))  # under the reader's eyes
    with pytest.raises(CorruptError, match="x: ends at byte 50, 40 bytes too early"):
        reader.read_into(40, memoryview(bytearray(50)))
    reader.close()


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, not a save that never ends."""
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: 0)
    with pytest.raises(OSError, match="nothing could be written"):
        put(LocalStorage(), str(tmp_path / "x"), b"1")


def test_removal(place: Place) -> None:
    storage, root = place
    for name in ("step-1", "step-1/deeper", "step-10"):
        storage.make_folder(storage.join(root, name))
        put(storage, storage.join(root, f"{name}/x"), b"1")
    storage.remove(storage.join(root, "step-1/x"))
    assert storage.names(storage.join(root, "step-1")) == ["deeper"]
    storage.remove(storage.join(root, "step-1"))
    assert storage.names(root) == ["step-10"], "what only begins with the same letters stays"
    storage.remove(storage.join(root, "step-1"))
    storage.remove(storage.join(root, "missing/x"))
    storage.remove(storage.join(root, "step-10/x/nothing is in a file"))
    assert get(storage, storage.join(root, "step-10/x")) == b"1"


def test_age(place: Place, tmp_path: Path) -> None:
    storage, root = place
    storage.make_folder(storage.join(root, "a"))
    put(storage, storage.join(root, "a/x"), b"1")
    assert -5 < storage.age(storage.join(root, "a/x")) < 60
    with pytest.raises(FileNotFoundError):
        storage.age(storage.join(root, "missing"))
    if not root.startswith("memory"):
        for path in (*tmp_path.rglob("*"), tmp_path):
            os.utime(path, (0, time.time() - 7200))
        assert 7100 < storage.age(storage.join(root, "a/x")) < 7300


def test_a_file_that_was_replaced_while_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of Hugging Face's is downloaded again during a load that keeps few files open."""
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 0)
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"old"), other.write_bytes(b"new")
    files = reading.OpenFiles(LocalStorage())
    with files.use(str(path)):
        pass
    other.replace(path)
    with pytest.raises(CheckpointError, match="no longer the file"), files.use(str(path)):
        pass
