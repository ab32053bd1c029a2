"""Which format a folder has. Layer: checkpoint."""

from collections.abc import Callable

from fsdp2.checkpoint.catalog import Catalog
from fsdp2.checkpoint.formats.dcp import is_dcp, open_dcp
from fsdp2.checkpoint.formats.deepspeed import is_deepspeed, open_deepspeed
from fsdp2.checkpoint.formats.huggingface import is_huggingface, open_huggingface
from fsdp2.checkpoint.manifest import MANIFEST
from fsdp2.checkpoint.replacing import open_found
from fsdp2.checkpoint.storage import Storage

__all__ = ["open_catalog"]

# Formats of other libraries: (is it there, read it), looked for in this order.
FOREIGN: list[tuple[Callable[[Storage, str], bool], Callable[[Storage, str], Catalog]]] = [
    (is_dcp, open_dcp),
    (is_huggingface, open_huggingface),
    (is_deepspeed, open_deepspeed),
]


def open_catalog(storage: Storage, path: str) -> Catalog:
    """The catalog of a folder.

    Raises:
        CheckpointError: no format that is known here is in it.
        CorruptError: one is, and is damaged.
    """
    # With a manifest in any condition it is ours: a consolidated checkpoint has the files of Hugging Face too, and must
    # not be read as such, without checksums, when its manifest is damaged.
    if MANIFEST not in storage.names(path):
        for is_there, opened in FOREIGN:
            # A save may be replacing it at this moment, between two renames: then look at what has come.
            if is_there(storage, path) and MANIFEST not in storage.names(path):
                return opened(storage, path)
    return open_found(storage, path)
