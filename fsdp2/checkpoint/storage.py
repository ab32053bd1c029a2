"""Where checkpoints live: the few operations that saving and loading need. Layer: checkpoint.

Implementations: `LocalStorage` in `local.py`; `RemoteStorage` in `remote.py`, through fsspec. Both pass the same tests.
"""

import os
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fsdp2.checkpoint.local import LocalStorage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError

__all__ = ["Folder", "PinnedStorage", "Reader", "Storage", "Writer", "check_file_name", "storage_of"]

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
    """A file that is being read, by several threads at the same time.

    Attributes:
        size: in bytes.
        chunk: how many bytes to ask for at a time, where something is to be done with them in between: what a
            processor's cache holds, or what is worth a request. A part of a block (see `checksum.py`), or several.
    """

    size: int
    chunk: int

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

    def write_all(self, path: str, content: bytes, new: bool = False) -> None:
        """Write a small file: afterwards it is there, durable and whole, or as it was before.

        Args:
            new: `FileExistsError` if it is there already; of several that write it, one does (in object stores whose
                fsspec package can do that, which those for S3 and Google can).
        """
        ...

    def open_file(self, path: str) -> Reader:
        """Open a file; `CheckpointError` if there is none."""
        ...

    def pinned(self, folder: str) -> "PinnedStorage":
        """This storage, for reading from `folder` as it is now: what takes its name later is not seen, and what it is
        replaced by cannot be mixed with it. `CheckpointError` if there is none."""
        ...

    def rename_folder(self, folder: str, to: str, durably: bool = True) -> None:
        """Give a folder (if not durably, also a file or a link) another name, in one step; `OSError` if it is taken."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if it is not there."""
        ...


class PinnedStorage(Storage, Protocol):
    """See `Storage.pinned`."""

    def close(self) -> None:
        """Release it; nothing reads any more."""
        ...


def storage_of(folder: Folder) -> tuple[Storage, str]:
    """(storage, path in it) of what a user names: a URL (``s3://bucket/run``, ``memory://x``) goes through fsspec."""
    if folder is None:
        raise CheckpointError(
            "there is no checkpoint: the folder is None, which `latest` returns for a run without one. On a first "
            "start skip the load: `if (folder := latest(run)) is not None: load(folder, ...)`"
        )
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
