"""Where checkpoints live: the few operations that saving and loading need, and a local file system. Layer: checkpoint.

Implementations: `LocalStorage` here; `RemoteStorage` in `remote.py`, through fsspec. Both pass the same contract tests.
"""

import errno
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from fsdp2.errors import ArgumentError, CheckpointError, CorruptError

__all__ = ["Folder", "LocalStorage", "Reader", "Storage", "Writer", "check_file_name", "storage_of"]

# No link is followed and no FIFO is waited for: a checkpoint is read and written within its folder only.
SAFE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# A folder, as users name it: a local path, or a URL for fsspec.
Folder = str | os.PathLike[str]


class Writer(Protocol):
    """A file that is being written. Threads may write different parts at the same time, if it is not sequential."""

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write these bytes one after the other from `offset`; through a sequential storage in order, without gaps."""
        ...

    def finish(self) -> None:
        """The file is complete: make it durable, then close it."""
        ...

    def abandon(self) -> None:
        """Close it without promise; never raises."""
        ...


class Reader(Protocol):
    """A file that is being read, by several threads at the same time."""

    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; `CorruptError` where the file ends before."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


@runtime_checkable
class Storage(Protocol):
    """A place for checkpoints. Paths are those of files and folders in it, joined by `join`.

    Attributes:
        sequential: files can only be written from the first byte to the last.
        renames: a folder can be renamed in one step. Without that, files go to their final folder at once, and the
            manifest, written last, is what makes it a checkpoint.
    """

    sequential: bool
    renames: bool

    def join(self, folder: str, name: str) -> str:
        """The path of `name` in `folder`."""
        ...

    def split(self, path: str) -> tuple[str, str]:
        """(folder, name) of a path."""
        ...

    def make_folder(self, folder: str) -> None:
        """Create it and its parents, durably; nothing happens if it is there."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of what is in a folder, sorted; empty if there is no such folder."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a regular file; None if there is none (symbolic links do not count)."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each regular file in a folder, by name: one look at the folder, however many there are."""
        ...

    def kind(self, path: str) -> str | None:
        """What is there, in a word ("file", "folder"); None if nothing is."""
        ...

    def age(self, path: str) -> float:
        """Seconds since a file, or anything in a folder, last changed."""
        ...

    def write_file(self, path: str, size: int) -> Writer:
        """Start a new file of `size` bytes."""
        ...

    def join_file(self, path: str, size: int) -> Writer:
        """Take part in writing a file of `size` bytes to which other ranks write too; the first creates it."""
        ...

    def write_all(self, path: str, content: bytes) -> None:
        """Write a small file: afterwards it is there, durable and whole, or as it was before."""
        ...

    def open_file(self, path: str) -> Reader:
        """Open a file; `CheckpointError` if there is none."""
        ...

    def rename_folder(self, folder: str, to: str) -> None:
        """Give a folder another name, durably, in one step; `OSError` if that is taken."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if it is not there."""
        ...


def storage_of(folder: Folder) -> tuple[Storage, str]:
    """(storage, path in it) of what a user names: a URL (``s3://bucket/run``, ``memory://x``) goes through fsspec."""
    path = os.fspath(folder)
    for scheme in ("file://", "local://"):
        path = path.removeprefix(scheme)
    if "://" in path:
        # Loaded only when asked for: fsspec is an extra.
        from fsdp2.checkpoint.remote import RemoteStorage

        storage = RemoteStorage(path)
        return storage, storage.root
    if re.match(r"[A-Za-z][\w+.-]+:/[^/]", path):
        raise ArgumentError(f"{path}: a URL that went through pathlib, which drops a slash; pass it as a string")
    # A link to a folder stands for that folder: what is renamed in the end is on its disk.
    return LocalStorage(), os.path.realpath(path)


def check_file_name(name: object, where: str) -> str:
    """A name that a file of a checkpoint may have: nothing that leads out of its folder.

    Raises:
        CorruptError: it is none.
    """
    allowed = isinstance(name, str) and 0 < len(name) <= 255 and not name.startswith(".") and name.isprintable()
    if not allowed or any(separator in str(name) for separator in ("/", "\\", ":", "\0")):
        raise CorruptError(f"{where}: {str(name)[:80]!r} cannot be a file of a checkpoint (it must lie in its folder)")
    return str(name)


class LocalStorage:
    """Files of a POSIX file system. Files and folders are durable (fsync) when a call says so."""

    sequential = False
    renames = True

    def join(self, folder: str, name: str) -> str:
        """See `Storage`."""
        return os.path.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        """See `Storage`."""
        return os.path.split(path)

    def make_folder(self, folder: str) -> None:
        """See `Storage`."""
        missing = []
        path = Path(folder)
        while not path.exists():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            _sync_folder(path.parent)

    def names(self, folder: str) -> list[str]:
        """See `Storage`."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        """See `Storage`."""
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Storage`."""
        try:
            with os.scandir(folder) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def kind(self, path: str) -> str | None:
        """See `Storage`."""
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(mode):
            return "symbolic link"
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special file"

    def age(self, path: str) -> float:
        """See `Storage`."""
        times = [os.lstat(path).st_mtime, *(os.lstat(self.join(path, name)).st_mtime for name in self.names(path))]
        return time.time() - max(times)

    def write_file(self, path: str, size: int) -> "LocalWriter":
        """See `Storage`."""
        return LocalWriter(path, size, os.O_TRUNC)

    def join_file(self, path: str, size: int) -> "LocalWriter":
        """See `Storage`."""
        return LocalWriter(path, size, 0)

    def write_all(self, path: str, content: bytes) -> None:
        """See `Storage`."""
        part = path + ".part"
        writer = LocalWriter(part, len(content), os.O_TRUNC)
        try:
            writer.write(0, [memoryview(content)])
            writer.finish()
        except BaseException:
            writer.abandon()
            with suppress(OSError):
                self.remove(part)
            raise
        os.replace(part, path)
        _sync_folder(os.path.dirname(path))

    def open_file(self, path: str) -> "LocalReader":
        """See `Storage`."""
        return LocalReader(path)

    def rename_folder(self, folder: str, to: str) -> None:
        """See `Storage`."""
        _sync_folder(folder)
        os.rename(folder, to)
        _sync_folder(os.path.dirname(to))

    def remove(self, path: str) -> None:
        """See `Storage`."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)


class LocalWriter:
    """See `Writer`. The file has its full size from the start, which shows a quota; a full disk shows while writing."""

    def __init__(self, path: str, size: int, flags: int):
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | SAFE_FLAGS | flags, 0o666)
        try:
            space = os.fstatvfs(self._fd)
            free = space.f_bavail * space.f_frsize
            # A file system without any blocks does not say how large it is (FUSE without statfs).
            if flags & os.O_TRUNC and space.f_blocks and free < size:
                raise OSError(errno.ENOSPC, f"No space left on device: {size} bytes are needed, {free} are free", path)
            os.ftruncate(self._fd, size)
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """See `Writer`."""
        remaining = [part for part in parts if part.nbytes]
        first = offset
        while remaining:
            written = os.pwritev(self._fd, remaining[:512], offset)
            if not written:
                raise OSError(errno.EIO, "nothing could be written", self._path)
            offset += written
            while remaining and written >= remaining[0].nbytes:
                written -= remaining.pop(0).nbytes
            if written:
                remaining[0] = remaining[0][written:]
        if sys.platform == "linux" and offset > first:
            # Let the disk begin now: the pages are dirty, so the hint starts their write-back and drops nothing.
            # Otherwise the disk idles until `finish`, and both times are paid one after the other.
            os.posix_fadvise(self._fd, first, offset - first, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """See `Writer`."""
        os.fsync(self._fd)
        self._close()

    def abandon(self) -> None:
        """See `Writer`."""
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        # Some file systems report errors only here. Even then the number is free, and may be another file's at once.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalReader:
    """See `Reader`. Reads, and never maps: a file that shrinks is an error then, not a SIGBUS."""

    def __init__(self, path: str):
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | SAFE_FLAGS)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptError(f"{path}: is not a regular file")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `Reader`."""
        while buffer.nbytes:
            count = os.preadv(self._fd, [buffer], offset)
            if not count:
                raise CorruptError(f"{self._path}: ends at byte {offset}, {buffer.nbytes} bytes too early")
            offset += count
            buffer = buffer[count:]

    def close(self) -> None:
        """See `Reader`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable, where the file system can (several network ones cannot, nor need to)."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder in which one may make files, but not list them
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)
