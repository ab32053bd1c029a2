"""Detect the format of a folder. Layer: checkpoint."""

import re
from collections.abc import Callable
from typing import NoReturn

from fsdp2.checkpoint.formats.dcp import is_dcp, open_dcp
from fsdp2.checkpoint.formats.huggingface import is_huggingface, open_huggingface
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.run.replacing import open_found
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import UnsupportedError

__all__ = ["checkpoints_in", "is_checkpoint", "open_catalog"]

DEEPSPEED_FILE = re.compile(r"zero_to_fp32\.py|.*_(model|optim)_states\.pt")


def _is_deepspeed(storage: Storage, path: str) -> bool:
    """Whether the folder is one that DeepSpeed's `save_checkpoint` was given, or one of a tag in it."""
    return any(DEEPSPEED_FILE.fullmatch(name) for name in storage.names(path))


def _refuse_deepspeed(storage: Storage, path: str) -> NoReturn:
    """Say how to export the weights."""
    raise UnsupportedError(
        f"{path}: is a DeepSpeed checkpoint; expected a format that is read here. Run `python zero_to_fp32.py . out "
        "--safe_serialization` in the folder that has DeepSpeed's file zero_to_fp32.py, and use the folder `out`, "
        "which has the fp32 weights, without the optimizer's state (docs/formats.md)."
    )


# Formats of other libraries: (detect, open), tried in this order.
FOREIGN: list[tuple[Callable[[Storage, str], bool], Callable[[Storage, str], Catalog]]] = [
    (is_dcp, open_dcp),
    (is_huggingface, open_huggingface),
    (_is_deepspeed, _refuse_deepspeed),
]


def open_catalog(storage: Storage, path: str, files_are_there: bool = True) -> Catalog:
    """The catalog of a folder.

    Args:
        files_are_there: False reads only the manifest of one of ours; files that it lists may be missing.

    Raises:
        CheckpointError: it has no format that is supported.
        CorruptError: it is damaged.
        UnsupportedError: it is a DeepSpeed checkpoint.
    """
    # A folder with a manifest, even a damaged one, is ours. A consolidated checkpoint also has the files of Hugging
    # Face, but it must not be read as such, without checksums, if its manifest is damaged.
    if MANIFEST not in storage.names(path):
        for is_there, opened in FOREIGN:
            # A save may be between the two renames of a replacement: then look at the new folder.
            if is_there(storage, path) and MANIFEST not in storage.names(path):
                return opened(storage, path)
    return open_found(storage, path, files_are_there)


def is_checkpoint(storage: Storage, path: str) -> bool:
    """Whether a folder is a checkpoint of any format, even a damaged one."""
    return MANIFEST in storage.names(path) or any(is_there(storage, path) for is_there, _ in FOREIGN)


def checkpoints_in(storage: Storage, path: str) -> list[str]:
    """The folders in a folder that are checkpoints of any format, sorted by the numbers in their names."""
    found = []
    for name in storage.names(path):
        folder = storage.join(path, name)
        if not name.startswith(".") and storage.kind(folder) == "folder" and is_checkpoint(storage, folder):
            found.append((name, folder))
    return [folder for _, folder in sorted(found, key=lambda each: (_numbers(each[0]), each[0]))]


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,18}", name)]
