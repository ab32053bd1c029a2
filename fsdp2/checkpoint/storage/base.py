"""Where checkpoints are stored: the few operations that saving and loading need. Layer: checkpoint.

Implementations: `LocalStorage` in `local.py`; `RemoteStorage` in `remote.py`, through fsspec. Both pass the same tests.
"""

import os
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError

__all__ = ["Folder", "PinnedStorage", "Reader", "Storage", "Writer", "check_file_name", "storage_of"]

# A folder, as users give it: a local path, or a URL for fsspec.
Folder = str | os.PathLike[str]


class Writer(Protocol):
    """A file being written. Unless the storage is sequential, threads may write different parts at the same time."""

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write these bytes one after the other from `offset`; in a sequential storage, in order and without gaps."""

    def finish(self) -> None:
        """The file is complete: make it durable, then close it."""

    def abandon(self) -> None:
        """Close it; its content is undefined. Never raises."""


class Reader(Protocol):
    """A file being read, by several threads at the same time.

    Attributes:
        size: in bytes.
        chunk: how many bytes to request at a time, if they are processed in between: what fits into a processor's
            cache, or what is worth a request. A fraction or a multiple of a block (see `checksum.py`).
    """

    size: int
    chunk: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; `CorruptError` if the file ends too early."""

    def close(self) -> None:
        """Release it."""


@runtime_checkable
class Storage(Protocol):
    """A place for checkpoints. Paths are those of files and folders in it, joined by `join`.

    Attributes:
        sequential: files can only be written from the first byte to the last.
        renames: a folder can be renamed atomically. Otherwise files go directly to their final folder, and the
            manifest, written last, makes it a checkpoint.
    """

    sequential: bool
    renames: bool

    def join(self, folder: str, name: str) -> str:
        """The path of `name` in `folder`."""

    def split(self, path: str) -> tuple[str, str]:
        """(folder, name) of a path."""

    def make_folder(self, folder: str) -> None:
        """Create it and its parents, durably, if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder."""

    def size(self, path: str) -> int | None:
        """Bytes of a regular file; None if there is none (symbolic links do not count)."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each regular file in a folder, by name. The folder is listed only once."""

    def kind(self, path: str) -> str | None:
        """What a path is, in a word ("file", "folder"); None if nothing is there."""

    def age(self, path: str) -> float:
        """Seconds since a file, or anything in a folder, last changed."""

    def write_file(self, path: str, size: int) -> Writer:
        """Start a new file of `size` bytes."""

    def join_file(self, path: str, size: int) -> Writer:
        """Open a file of `size` bytes that several ranks write to; the first one creates it."""

    def write_all(self, path: str, content: bytes, new: bool = False) -> None:
        """Write a small file atomically and durably.

        Args:
            new: `FileExistsError` if it exists already. If several write it, only one succeeds (in object stores: if
                their fsspec package supports that, as those for S3 and Google do).
        """

    def open_file(self, path: str) -> Reader:
        """Open a file; `CheckpointError` if there is none."""

    def pinned(self, folder: str) -> "PinnedStorage":
        """This storage, for reading from `folder` as it is now: if another folder takes its name, no files of that are
        seen. `CheckpointError` if there is none."""

    def rename_folder(self, folder: str, to: str, durably: bool = True) -> None:
        """Rename a folder atomically (if not durably, also a file or a link); `OSError` if the name is taken."""

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""


class PinnedStorage(Storage, Protocol):
    """See `Storage.pinned`."""

    def close(self) -> None:
        """Release it, after the last read."""


def storage_of(folder: Folder) -> tuple[Storage, str]:
    """(storage, path in it) of a user's folder; a URL (``s3://bucket/run``, ``memory://x``) goes through fsspec."""
    if folder is None:
        raise CheckpointError(
            "there is no checkpoint: the folder is None, which `latest` returns for a run without one. On a first "
            "start skip the load: `if (folder := latest(run)) is not None: load(folder, ...)`"
        )
    try:
        path = os.fsdecode(folder)
    except TypeError:
        raise ArgumentError(f"expected the path or URL of a folder, got {folder!r}") from None
    for scheme in ("file://", "local://"):
        path = path.removeprefix(scheme)
    if "://" in path:
        # Imported only when needed: fsspec is optional.
        from fsdp2.checkpoint.storage.remote import RemoteStorage

        storage = RemoteStorage(path)
        return storage, storage.root
    if re.match(r"[A-Za-z][\w+.-]+:/[^/]", path):
        raise ArgumentError(f"{path}: a URL that went through pathlib, which drops a slash; pass it as a string")
    # A link to a folder stands for that folder: the final rename happens on the disk of the target.
    return LocalStorage(), os.path.realpath(path)


def check_file_name(name: object, where: str) -> str:
    """A name that a file of a checkpoint may have: it cannot lead out of the folder.

    Raises:
        CorruptError: the name is invalid.
    """
    allowed = isinstance(name, str) and 0 < len(name) <= 255 and not name.startswith(".") and name.isprintable()
    if not allowed or any(separator in str(name) for separator in ("/", "\\", ":", "\0")):
        raise CorruptError(f"{where}: {str(name)[:80]!r} cannot be a file of a checkpoint (it must lie in its folder)")
    return str(name)
