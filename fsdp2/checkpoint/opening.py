"""Open a folder of any format, also while a save replaces it. Layer: checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.checkpoint.formats.dcp import is_dcp, open_dcp
from fsdp2.checkpoint.formats.huggingface import is_huggingface, open_huggingface
from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.run.folders import find, id_at, is_whole, manifest_at
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CheckpointError, MismatchError, ReplacedError

__all__ = ["not_replaced", "open_catalog"]


def open_catalog(storage: Storage, path: str, checks_files: bool = True) -> Catalog:
    """The catalog of a folder, which may be replaced at the same time.

    Args:
        checks_files: if False, only the manifest of a native checkpoint is read, and its files may be missing.

    Raises:
        CheckpointError: it has no supported format.
        CorruptError: it is damaged.
    """
    # A folder with a manifest, even a damaged one, is native. A consolidated checkpoint also has the files of Hugging
    # Face, but must not be read as such, without checksums, if its manifest is damaged.
    if MANIFEST not in storage.names(path):
        for is_there, opened in ((is_dcp, open_dcp), (is_huggingface, open_huggingface)):
            # A save may be between the two renames of a replacement: then look at the new folder.
            if is_there(storage, path) and MANIFEST not in storage.names(path):
                return opened(storage, path)
    return NativeCatalog(storage, *manifest_at(storage, path, checks_files))


@contextmanager
def not_replaced(storage: Storage, path: str, catalog: Catalog) -> Iterator[None]:
    """Read a native checkpoint within this context. The header of each file, except for consolidated ones, identifies
    its save (see `native.py`), so a replacement of the folder in the meantime is noticed.

    Raises:
        ReplacedError: another save replaced it, or it was deleted.
    """
    cause: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as error:
        if not isinstance(catalog, NativeCatalog) or isinstance(error, (MismatchError, ReplacedError)):
            raise
        cause = error
    if not isinstance(catalog, NativeCatalog) or (cause is None and catalog.manifest.layout == "ranks"):
        return
    now = id_at(storage, path)
    # If a file could not be opened but exists now, the folder was set aside and put back in the meantime (found by
    # `test_two_jobs_that_overwrite_one_name`).
    was_aside = type(cause) is CheckpointError and now is not None and is_whole(storage, find(storage, path))
    is_gone = now is None and storage.kind(catalog.path) is None
    if (now is None and not is_gone) or (now == catalog.manifest.id and not was_aside):
        if cause is not None:
            raise cause
        return
    what = "was deleted" if now is None else f"was replaced by save {now}"
    raise ReplacedError(f"{path}: {what} while it was read (save {catalog.manifest.id}); read it again") from cause
