"""What `torch.distributed.checkpoint` saves, without the warnings that belong to how it is called here."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

__all__ = ["change_metadata", "save_dcp"]


def save_dcp(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """By this process alone. `options` are the writer's. Returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Edit what its ``.metadata`` says."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
