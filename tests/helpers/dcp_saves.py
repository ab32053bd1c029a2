"""What `torch.distributed.checkpoint` saves, without the warnings that belong to how it is called here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

__all__ = ["save_dcp", "save_dcp_without_collectives"]


def save_dcp(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """By this process alone. `options` are the writer's. Returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def save_dcp_without_collectives(folder: Path, state: dict[str, Any]) -> None:
    """By all ranks, each on its own; they end together.

    A rank that comes when rank 0 is through finds the metadata of rank 0 in the folder, takes it for that of an earlier
    save and warns. Once in many runs, on a busy machine, that failed a test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, use_collectives=False)
    dist.barrier()
