"""Which format a folder has. Layer: checkpoint."""

import re
from collections.abc import Callable

from fsdp2.checkpoint.catalog import Catalog
from fsdp2.checkpoint.formats.dcp import is_dcp, open_dcp
from fsdp2.checkpoint.formats.deepspeed import is_deepspeed, open_deepspeed
from fsdp2.checkpoint.formats.huggingface import is_huggingface, open_huggingface
from fsdp2.checkpoint.manifest import MANIFEST
from fsdp2.checkpoint.replacing import open_found
from fsdp2.checkpoint.storage import Storage

__all__ = ["checkpoints_in", "is_checkpoint", "open_catalog"]

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


def is_checkpoint(storage: Storage, path: str) -> bool:
    """Whether a folder is a checkpoint of any format, in whatever condition."""
    return MANIFEST in storage.names(path) or any(is_there(storage, path) for is_there, _ in FOREIGN)


def checkpoints_in(storage: Storage, path: str) -> list[str]:
    """The folders in a folder that are checkpoints of any format, in the order of the numbers in their names."""
    found = []
    for name in storage.names(path):
        folder = storage.join(path, name)
        if not name.startswith(".") and storage.kind(folder) == "folder" and is_checkpoint(storage, folder):
            found.append((name, folder))
    return [folder for _, folder in sorted(found, key=lambda each: (_numbers(each[0]), each[0]))]


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,18}", name)]
