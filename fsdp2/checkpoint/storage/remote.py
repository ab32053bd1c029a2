"""Checkpoints in object stores, through fsspec (an optional dependency). Layer: checkpoint.

Unlike on a local file system, files are written from the first byte to the last and appear complete or not at all, and
folders are only parts of names, which cannot be renamed. So files are written directly to their final folder, and the
manifest, written last, makes it a checkpoint.
"""

import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from errno import EEXIST
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from fsdp2.errors import ArgumentError, CheckpointError, CorruptError, FSDPError, UnsupportedError

__all__ = ["RemoteReader", "RemoteStorage"]

# Other protocols show files that are still being written.
OBJECT_STORES = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"})

# Seconds to wait before a failed request is sent again. Some clients retry too, for some errors.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)

# Errors that are answers of the store, so retrying does not help.
ANSWERS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)

Result = TypeVar("Result")


class RemoteStorage:
    """See `LocalStorage`. Paths in it are URLs.

    Credentials and endpoints come from fsspec's own configuration: environment variables such as
    ``FSSPEC_S3_ENDPOINT_URL``, files in ``~/.config/fsspec``, and the configuration of the cloud's own client.

    Args:
        url: the URL of any folder in it.

    Attributes:
        root: `url` without trailing slashes.

    Raises:
        ArgumentError: the URL cannot be used here.
        UnsupportedError: fsspec, or its package for this protocol, is not installed.

    Example::

        storage = RemoteStorage("s3://bucket/run")
        storage.names(storage.root)
    """

    renames = False

    def __init__(self, url: str):
        try:
            self._fsspec: Any = import_module("fsspec")
        except ImportError as error:
            raise UnsupportedError(f"{url}: URLs need the package fsspec: pip install 'fsdp2[remote]'") from error
        # fsspec treats "a::b" as a chain of file systems, and deletes by pattern.
        if "::" in url or any(mark in url for mark in "*?["):
            raise ArgumentError(f"{url}: expected a plain URL, without '::', '*', '?' and '['")
        scheme, rest = self._parts(url)
        if scheme not in OBJECT_STORES:
            raise UnsupportedError(f"{url}: expected a local folder, or one of {', '.join(sorted(OBJECT_STORES))}")
        self.root = f"{scheme}://{rest}"
        with _errors(url):
            try:
                self._fs, _ = self._fsspec.core.url_to_fs(self.root)
            except ImportError as error:
                raise UnsupportedError(f"{url}: fsspec cannot use it: {error}") from error
            except ValueError as error:
                raise ArgumentError(f"{url}: fsspec cannot use it: {error}") from error

    def join(self, folder: str, name: str) -> str:
        """See `LocalStorage`."""
        scheme, rest = self._parts(folder)
        return f"{scheme}://{posixpath.join(rest, name)}"

    def split(self, path: str) -> tuple[str, str]:
        """See `LocalStorage`."""
        scheme, rest = self._parts(path)
        folder, name = posixpath.split(rest)
        return f"{scheme}://{folder}", name

    def make_folder(self, folder: str) -> None:
        """Does nothing. (It might create a bucket, which must not happen because of a misspelt name.)"""

    def names(self, folder: str) -> list[str]:
        """See `LocalStorage`."""
        return sorted({posixpath.basename(_name_of(entry)) for entry in self._list(folder)})

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if it does not exist."""
        entry = self._look(path)
        return int(entry["size"]) if entry is not None and _kind_of(entry) == "file" else None

    def sizes(self, folder: str) -> dict[str, int]:
        """See `LocalStorage`. One request for all files."""
        files = [entry for entry in self._list(folder) if _kind_of(entry) == "file"]
        return {posixpath.basename(_name_of(entry)): int(entry["size"]) for entry in files}

    def kind(self, path: str) -> str | None:
        """See `LocalStorage`."""
        entry = self._look(path)
        return _kind_of(entry) if entry is not None else None

    def age(self, path: str) -> float:
        """See `LocalStorage`; only for files. Zero if the file system does not report it: the file may be in use."""

        def modified() -> datetime | None:
            with suppress(NotImplementedError):
                changed: datetime = self._fs.modified(self._bare(path))
                return changed if changed.tzinfo is not None else changed.replace(tzinfo=UTC)
            return None

        changed = self._call(path, modified)
        return 0.0 if changed is None else time.time() - changed.timestamp()

    def upload(self, path: str, content: Callable[[], Iterable[memoryview]]) -> None:
        """Write a file from the first byte to the last. If a request fails, start again.

        Args:
            content: returns a new iterator over the bytes in each call.
        """

        def upload() -> None:
            with _errors(path):
                handle = self._fs.open(self._bare(path), "wb")
                try:
                    for view in content():
                        handle.write(view)
                    handle.close()
                except BaseException:
                    with suppress(Exception):
                        handle.closed = True  # closing it would upload the part written so far as if it were the file
                        handle.discard()
                    raise

        _again(upload)

    def write_all(self, path: str, content: bytes, new: bool = False) -> None:
        """See `LocalStorage`.

        Args:
            new: raise `FileExistsError` if it exists already. If several processes write it, only one succeeds, if
                their fsspec package supports that (as those for S3 and Google do).
        """
        if new and _again(lambda: self._created(path, content)):
            return
        if new and self.kind(path) is not None:
            raise FileExistsError(EEXIST, f"{path}: already exists")
        self._call(path, lambda: self._fs.pipe_file(self._bare(path), content))

    write_note = write_all

    def _created(self, path: str, content: bytes) -> bool:
        """Create a file in one request that fails if the file exists. Returns whether this is supported: old fsspec
        packages lack the argument, and old stores lack the condition."""
        with _errors(path):
            try:
                self._fs.pipe_file(self._bare(path), content, mode="create")
            except (TypeError, NotImplementedError):
                return False
            except OSError as error:
                if "NotImplemented" in str(error):
                    return False
                raise
        return True

    def open_file(self, path: str) -> "RemoteReader":
        """See `LocalStorage`."""
        try:
            entry = self._look(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error})") from error
        if entry is None:
            raise CheckpointError(f"{path}: cannot be opened (there is no such file)")
        if _kind_of(entry) != "file":
            raise CorruptError(f"{path}: is not a regular file")
        return RemoteReader(self._fs, path, self._bare(path), int(entry["size"]))

    def rename_folder(self, folder: str, to: str, durably: bool = True) -> None:
        """See `LocalStorage`; not supported here."""
        raise UnsupportedError(f"{folder}: folders cannot be renamed atomically here")

    def remove(self, path: str) -> None:
        """See `LocalStorage`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._call(path, lambda: self._fs.rm(self._bare(path), recursive=True))

    def _list(self, folder: str) -> list[Mapping[str, Any]]:
        """The current content of a folder, as fsspec describes it."""
        bare = self._bare(folder)
        try:
            entries = self._call(folder, lambda: self._fs.ls(bare, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # The listing of a file contains the file itself, and some object stores have an empty object for the folder.
        return [entry for entry in entries if _name_of(entry) != bare.rstrip("/")]

    def _look(self, path: str) -> Mapping[str, Any] | None:
        """A file or folder as fsspec describes it; None if it does not exist."""
        try:
            entry: Mapping[str, Any] = self._call(path, lambda: self._fs.info(self._bare(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return entry

    def _call(self, path: str, request: Callable[[], Result]) -> Result:
        """The result of a request, which may be sent several times."""

        def call() -> Result:
            with _errors(path):
                self._fs.invalidate_cache()  # other processes write here too, so a cached listing may be out of date
                return request()

        return _again(call)

    def _bare(self, path: str) -> str:
        """A path without the protocol, as the file system expects it."""
        return str(self._fsspec.core.strip_protocol(path))

    @staticmethod
    def _parts(url: str) -> tuple[str, str]:
        """("s3", "bucket/run") for "s3://bucket/run/"."""
        scheme, separator, rest = url.partition("://")
        if not separator or not scheme:
            raise ArgumentError(f"{url}: expected a URL such as s3://bucket/run")
        return scheme, rest.rstrip("/") or rest[:1]


class RemoteReader:
    """See `LocalReader`. Every read is a separate request for exactly these bytes. Threads share nothing, and nothing
    is cached or read ahead."""

    chunk = 4 << 20

    def __init__(self, fs: Any, path: str, bare: str, size: int):
        self._fs = fs
        self._path = path
        self._bare = bare
        self.size = size
        self.identity: object = path  # files are never replaced, since each save has its own file names

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `LocalReader`."""
        end = offset + buffer.nbytes
        if end > self.size:
            raise self._too_short(self.size, end)
        data = _again(partial(self._read, offset, end)) if buffer.nbytes else b""
        if len(data) != buffer.nbytes:
            raise self._too_short(offset + len(data), end)
        buffer[:] = data

    def _read(self, start: int, stop: int) -> bytes:
        with _errors(self._path):
            data: bytes = self._fs.cat_file(self._bare, start=start, end=stop)
        return data

    def close(self) -> None:
        """See `LocalReader`; nothing is open."""

    def _too_short(self, at: int, end: int) -> CorruptError:
        return CorruptError(f"{self._path}: ends at byte {at}, {end - at} bytes too early")


def _again(request: Callable[[], Result]) -> Result:
    """The result of a request. If it fails without an answer, it is retried a few times."""
    for wait_s in WAITS_S:
        try:
            return request()
        except ANSWERS:
            raise
        except OSError:
            time.sleep(wait_s)
    return request()


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turn every exception of a file system into an `OSError` that names the path; callers handle no others."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or path in str(error):
            raise
        builtin = type(error).__module__ == "builtins"
        named = f"{path}: {error.strerror or error}"
        raise (OSError(error.errno, named) if error.errno else (type(error) if builtin else OSError)(named)) from error
    except (FSDPError, MemoryError, AssertionError):
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _name_of(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/")


def _kind_of(entry: Mapping[str, Any]) -> str:
    """See `LocalStorage.kind`."""
    return {"file": "file", "directory": "folder"}.get(entry["type"], "special file")
