"""Reading a checkpoint while a save replaces or deletes it. Layer: checkpoint.

A reader pins the folder that it found (see `LocalStorage.pinned`), so it never mixes files of two saves. Files may
still disappear before they are read. If the name now belongs to another checkpoint, this is not damage, and the reader
starts again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fsdp2.checkpoint.formats.native import NativeCatalog, id_of, read_manifest
from fsdp2.checkpoint.run.folders import find
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CheckpointError, MismatchError, ReplacedError

__all__ = ["READS", "id_at", "not_replaced", "open_found"]

READS = 3  # attempts of a load, if each time another save replaced the checkpoint that was being read
OPENINGS = 20  # likewise, for reading only the manifest


def open_found(storage: Storage, path: str, files_are_there: bool = True) -> NativeCatalog:
    """The catalog of the checkpoint `path`, which may be replaced concurrently.

    Args:
        files_are_there: False reads only the manifest, for `describe`.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptError: it is damaged.
    """
    for _ in range(OPENINGS):
        found = find(storage, path)
        pinned = id_seen = None
        try:
            pinned = storage.pinned(found)
            catalog = NativeCatalog(pinned, found, read_manifest(pinned, found))
            id_seen = catalog.manifest.id
            if files_are_there:
                catalog.check_sizes()
            return catalog
        except BaseException as error:
            if pinned is not None:
                pinned.close()
            if not isinstance(error, (CheckpointError, OSError)) or id_at(storage, path) in (None, id_seen):
                raise
    raise ReplacedError(f"{path}: is replaced by one save after another, faster than it can be opened")


def id_at(storage: Storage, path: str) -> str | None:
    """The current id of the checkpoint `path`, wherever it is; None if there is none, or it cannot be read."""
    with suppress(CheckpointError, OSError):
        return id_of(storage, find(storage, path))
    return None


@contextmanager
def not_replaced(storage: Storage, path: str, catalog: object) -> Iterator[None]:
    """Within this context, an error of reading a native checkpoint is checked: the checkpoint may have been replaced.

    Raises:
        ReplacedError: another save replaced it, or it was deleted.
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
