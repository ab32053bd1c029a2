"""Readers beside a writer that replaces, or deletes, what they read. Layer: checkpoint.

A reader pins the folder that it found (see `Storage.pinned`), so it never sees files of two saves. What can happen is
that files are gone when it comes to them. Then the checkpoint of that name is another one by now: that is no damage,
and the reader begins again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fsdp2.checkpoint.folders import find
from fsdp2.checkpoint.formats.native import NativeCatalog, read_manifest
from fsdp2.checkpoint.storage import Storage
from fsdp2.errors import CheckpointError, MismatchError, ReplacedError

__all__ = ["READS", "id_at", "not_replaced", "open_found"]

READS = 3  # how often a load begins, at most: as long as each time another save has taken the place of what it read
OPENINGS = 20  # likewise, to read a manifest alone


def open_found(storage: Storage, path: str, files_are_there: bool = True) -> NativeCatalog:
    """The catalog of the checkpoint `path`, which may be replaced at this moment.

    Args:
        files_are_there: False reads the manifest alone, for `describe`.

    Raises:
        CheckpointError: there is none.
        CorruptError: it is damaged.
    """
    for _ in range(OPENINGS):
        found = find(storage, path)
        pinned = id_seen = None
        try:
            pinned = storage.pinned(found)
            manifest = read_manifest(pinned, found)
            id_seen = manifest.id
            return NativeCatalog.checked(pinned, found, manifest, files_are_there)
        except BaseException as error:
            if pinned is not None:
                pinned.close()
            if not isinstance(error, (CheckpointError, OSError)) or id_at(storage, path) in (None, id_seen):
                raise
    raise ReplacedError(f"{path}: is replaced by one save after the other, faster than it can be opened")


def id_at(storage: Storage, path: str) -> str | None:
    """The id of the checkpoint `path` as it is now; None if there is none, or it cannot be read."""
    with suppress(CheckpointError, OSError):
        return read_manifest(storage, find(storage, path)).id
    return None


@contextmanager
def not_replaced(storage: Storage, path: str, catalog: object) -> Iterator[None]:
    """Within, errors of reading a native checkpoint are told apart: it may have been replaced.

    Raises:
        ReplacedError: by another save, or it was deleted.
    """
    try:
        yield
    except MismatchError:
        raise
    except (CheckpointError, OSError) as error:
        if not isinstance(catalog, NativeCatalog) or isinstance(error, ReplacedError):
            raise
        now = id_at(storage, path)
        if now == catalog.manifest.id or (now is None and storage.kind(catalog.path) is not None):
            raise
        what = "was deleted" if now is None else f"was replaced by save {now}"
        raise ReplacedError(f"{path}: {what} while it was read (save {catalog.manifest.id}); read it again") from error
