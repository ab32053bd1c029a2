"""Which format a folder has. Layer: checkpoint."""

from contextlib import suppress

from fsdp2.checkpoint.catalog import Catalog
from fsdp2.checkpoint.folders import find
from fsdp2.checkpoint.huggingface import is_huggingface, open_huggingface
from fsdp2.checkpoint.native import NativeCatalog
from fsdp2.checkpoint.storage import Storage
from fsdp2.errors import CheckpointError

__all__ = ["open_catalog"]


def open_catalog(storage: Storage, path: str) -> Catalog:
    """The catalog of a folder.

    Raises:
        CheckpointError: no format that is known here is in it.
        CorruptError: one is, and is damaged.
    """
    with suppress(CheckpointError):
        return _open_native(storage, path)
    if is_huggingface(storage, path):
        return open_huggingface(storage, path)
    return _open_native(storage, path)


def _open_native(storage: Storage, path: str) -> NativeCatalog:
    return NativeCatalog.open(storage, find(storage, path))
