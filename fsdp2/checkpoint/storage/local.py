"""Checkpoints on a local file system (POSIX). Layer: checkpoint."""

import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp2.disk.direct import PAGE, DirectFile, open_direct
from fsdp2.errors import CheckpointError, CorruptError

__all__ = ["LocalReader", "LocalStorage", "LocalWriter"]

# Do not follow links or wait for FIFOs: a checkpoint is only read and written within its folder.
SAFE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# Smaller writes go to the page cache, which collects them. Writes of a GPU's values have the size of a block, 1 MiB.
DIRECT_FROM = 256 << 10


class LocalStorage:
    """Files of a POSIX file system. Paths are those of files and folders in it, joined by `join`.

    Attributes:
        renames: a folder can be renamed atomically, and a file can be written in any order. Otherwise files are written
            directly to the final folder, from the first byte to the last, and the manifest makes it a checkpoint.
    """

    renames = True

    def join(self, folder: str, name: str) -> str:
        """The path of `name` in `folder`."""
        return os.path.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        """(folder, name) of a path."""
        return os.path.split(path)

    def make_folder(self, folder: str) -> None:
        """Create it and its parents, durably, if it does not exist."""
        if not os.path.exists(folder):
            self.make_folder(os.path.dirname(folder))
            with suppress(FileExistsError):
                os.mkdir(folder)
            _sync_folder(os.path.dirname(folder))

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if it does not exist."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each regular file in a folder, by name. The folder is listed only once."""
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
        """The kind of a path, as a word ("file", "folder"); None if it does not exist."""
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(mode):
            return "symbolic link"
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special file"

    def age(self, path: str) -> float:
        """Seconds since a file, or anything in a folder, last changed."""
        times = [os.lstat(path).st_mtime, *(os.lstat(self.join(path, name)).st_mtime for name in self.names(path))]
        return time.time() - max(times)

    def write_file(self, path: str, size: int, shared: bool = False) -> "LocalWriter":
        """Start a file of `size` bytes: a new one, or (`shared`) one that several ranks write to, created by the
        first."""
        return LocalWriter(path, size, 0 if shared else os.O_TRUNC)

    def write_all(self, path: str, content: bytes) -> None:
        """Write a small file atomically and durably."""
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

    def write_note(self, path: str, content: bytes) -> None:
        """Write a small file that only a running save reads: not synced."""
        with _naming(path), open(path, "wb") as file:
            file.write(content)

    def open_file(self, path: str) -> "LocalReader":
        """Open a file; `CheckpointError` if it does not exist."""
        return LocalReader(path)

    def rename_folder(self, folder: str, to: str, durably: bool = True) -> None:
        """Rename a folder atomically; `OSError` if the name is taken. With ``durably=False`` also a file or a link."""
        if durably:
            _sync_folder(folder)
        os.rename(folder, to)
        if durably:
            _sync_folder(os.path.dirname(to))

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""
        if os.path.isdir(path) and not os.path.islink(path):
            with suppress(FileNotFoundError):  # another process may be deleting it too
                shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)


class LocalWriter:
    """A file being written. Threads may write different parts at the same time, if folders can be renamed.

    The file has its full size from the start, so a quota is detected at once; a full disk is detected on writing."""

    def __init__(self, path: str, size: int, flags: int):
        self._path = path
        self._direct: DirectFile | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | SAFE_FLAGS | flags, 0o666)
        try:
            space = os.fstatvfs(self._fd)
            free = space.f_bavail * space.f_frsize
            # A file system that reports no blocks does not report its size (FUSE without statfs).
            if flags & os.O_TRUNC and space.f_blocks and free < size:
                raise OSError(errno.ENOSPC, f"No space left on device: {size} bytes are needed, {free} are free", path)
            with _naming(path):
                os.ftruncate(self._fd, size)
            self._direct = open_direct(path, self._fd, os.O_WRONLY | SAFE_FLAGS) if size >= DIRECT_FROM else None
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write these bytes one after the other from `offset`. If folders cannot be renamed, calls must be in order and
        without gaps. Whole pages bypass the page cache; pages that others may write to too go through it."""
        end = offset + sum(part.nbytes for part in parts)
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        with _naming(self._path):
            if self._direct is None or last - first < DIRECT_FROM:
                self._write_cached(offset, parts)
                return
            head, rest = _split(parts, first - offset)
            pages, tail = _split(rest, last - first)
            if not self._direct.write(first, pages):
                self._write_cached(first, pages)
            self._write_cached(offset, head)
            self._write_cached(last, tail)

    def _write_cached(self, offset: int, parts: Sequence[memoryview]) -> None:
        first = offset
        for part in parts:
            while part.nbytes:
                written = os.pwritev(self._fd, [part], offset)
                if not written:
                    raise OSError(errno.EIO, "nothing could be written", self._path)
                part, offset = part[written:], offset + written
        if sys.platform == "linux" and offset > first:
            # Start writing to the disk now: for dirty pages this hint starts the write-back and drops nothing.
            # Otherwise the disk is idle until `finish`.
            os.posix_fadvise(self._fd, first, offset - first, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """The file is complete: make it durable, then close it."""
        with _naming(self._path):
            os.fsync(self._fd)
            self._close()

    def abandon(self) -> None:
        """Close it; its content is undefined. Never raises."""
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        # Some file systems report errors only here. The descriptor is closed even then, and may be reused at once.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _split(parts: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `nbytes` of these parts, and the rest."""
    first, rest = [], []
    for part in parts:
        first.append(part[:nbytes])
        rest.append(part[nbytes:])
        nbytes -= first[-1].nbytes
    return first, rest


class LocalReader:
    """A file being read by several threads at the same time. It is not mapped, so that a file that shrinks causes an
    error, not a SIGBUS.

    Attributes:
        size: in bytes.
        identity: identifies the file, whatever its name.
        chunk: how many bytes to request at a time, if they are processed in between: as many as fit into a processor's
            cache, or as many as are worth a request. A fraction or a multiple of a block (see `checksum.py`).
    """

    # Source and destination, twice this, must fit into the cache of one core (1 or 2 MiB) while the checksum is
    # computed. With half of it, the overhead of calls exceeds the gain. Must divide a block.
    chunk = 256 << 10

    def __init__(self, path: str):
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | SAFE_FLAGS)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
        status = os.fstat(self._fd)
        self.size = status.st_size
        self.identity: object = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptError(f"{path}: is not a regular file")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; `CorruptError` if the file ends too early."""
        while buffer.nbytes:
            with _naming(self._path):
                count = os.preadv(self._fd, [buffer], offset)
            if count == buffer.nbytes:
                return
            if not count:
                raise CorruptError(f"{self._path}: ends at byte {offset}, {buffer.nbytes} bytes too early")
            offset += count
            buffer = buffer[count:]

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """In this context errors of an open file name the file, as those of `open` do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def _sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable, if the file system can (some network file systems cannot, and need not)."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # the folder permits creating files, but not listing them
        return
    try:
        with _naming(str(folder)):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)
