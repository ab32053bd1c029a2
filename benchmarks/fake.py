"""One rank of many on paper: a process group whose other ranks do not exist.

Two backends serve. ``fake`` is torch's own. Its all-gather copies the rank's shard into every row, one by one: at
hundreds of ranks that fills a profile, and no real backend does it on the host. So the collectives of a step can be
recorded (`collectives_of`), and run again alone. ``silent`` is the same with collectives that do nothing at all.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

BACKENDS = ("fake", "silent")

Result = TypeVar("Result")


@dataclass(frozen=True)
class FakeRank:
    """Rank `rank` of `ranks`, with one of `BACKENDS`."""

    rank: int
    ranks: int
    backend: str = "fake"


def in_fake_rank(where: FakeRank, body: Callable[..., Result], *args: Any) -> Result:
    """Call `body` as that rank, in a forked process of its own: nothing is left of it afterwards.

    What it returns must be picklable. Raises RuntimeError with the traceback if it raises.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_as_rank, args=(send, where, lambda: body(*args)))
    process.start()
    send.close()
    try:
        succeeded, result = receive.recv()  # EOFError: the process was killed, for its memory, say
    finally:
        process.join(5)
        process.kill()
    if not succeeded:
        raise RuntimeError(f"{where} failed:\n{result}")
    return result


def _as_rank(pipe: Connection, where: FakeRank, body: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "DTensor random operators")
    try:
        dist.init_process_group(where.backend, rank=where.rank, world_size=where.ranks, store=FakeStore())
        result = True, body()
        dist.destroy_process_group()
    except BaseException:
        result = False, traceback.format_exc()
    pipe.send(result)
    pipe.close()


class Nothing(dist.Work):
    """A collective that was over before it began."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Silent(dist.ProcessGroup):
    """Collectives that touch no memory. Only those that sharding needs; others fail."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.nothing = Nothing()
        self.name = ""

    @property
    def group_name(self) -> str:  # the base class asks its backend, and here is none
        return self.name

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _nothing(self, *args: Any, **kwargs: Any) -> Nothing:
        return self.nothing

    allreduce = barrier = broadcast = scatter = _nothing
    _allgather_base = allgather_into_tensor_coalesced = _nothing
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _nothing
    all_gather_single = all_gather_single_coalesced = _nothing  # their names from torch 2.13 on
    reduce_scatter_single = reduce_scatter_single_coalesced = _nothing


dist.Backend.register_backend("silent", lambda store, rank, size, timeout: Silent(rank, size), devices=["cpu", "cuda"])


class Recorder(TorchDispatchMode):
    """While active, notes every collective with the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            own = tree_map_only(torch.Tensor, torch.zeros_like, args)  # not the step's, whose storages come and go
            self.calls.append(lambda: function(*own, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def collectives_of(step: Callable[[], None]) -> Callable[[], None]:
    """Run `step` once; return a step that issues the same collectives, on memory of its own, and nothing else."""
    with Recorder() as recorder:
        step()

    def replay() -> None:
        for call in recorder.calls:
            call()

    return replay
