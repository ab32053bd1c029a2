"""Ranks that run what the program tells them: processes of this machine, in one process group of gloo."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(*args)`` in new processes, one for each rank; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (ranks, folder, work, args), nprocs=ranks)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(work(*args)))
    dist.barrier()
    dist.destroy_process_group()
