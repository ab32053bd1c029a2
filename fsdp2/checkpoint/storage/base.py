"""The few storage operations that saving and loading need. Layer: checkpoint.

`LocalStorage` in `local.py` documents them; `RemoteStorage` in `remote.py`, through fsspec, has the same ones. Both
pass the same tests.
"""

import os
import re

from fsdp2.checkpoint.storage.local import LocalReader, LocalStorage
from fsdp2.checkpoint.storage.remote import RemoteReader, RemoteStorage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError

__all__ = ["Folder", "Reader", "Storage", "check_file_name", "storage_of"]

# A folder, as users give it: a local path, or a URL for fsspec.
Folder = str | os.PathLike[str]

Storage = LocalStorage | RemoteStorage
Reader = LocalReader | RemoteReader


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
        storage = RemoteStorage(path)
        return storage, storage.root
    if re.match(r"[A-Za-z][\w+.-]+:/[^/]", path):
        raise ArgumentError(f"{path}: a URL that went through pathlib, which drops a slash; pass it as a string")
    # A link to a folder stands for that folder: the final rename happens on the disk of the target.
    return LocalStorage(), os.path.realpath(path)


def check_file_name(name: object, where: str) -> str:
    """Check that a name can be that of a checkpoint's file: it must not lead out of the folder.

    Raises:
        CorruptError: the name is invalid.
    """
    allowed = isinstance(name, str) and 0 < len(name) <= 255 and not name.startswith(".") and name.isprintable()
    if not allowed or any(separator in str(name) for separator in ("/", "\\", ":", "\0")):
        raise CorruptError(f"{where}: {str(name)[:80]!r} cannot be a file of a checkpoint (it must lie in its folder)")
    return str(name)
