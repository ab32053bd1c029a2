"""What every rank of a job needs before and around training: the process group, agreement on errors, stopping.

Imported by the other examples. All functions that take part in communication say so; all ranks must call those alike.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# What torchrun puts into the environment, for a process that it did not start. Port 0: any free one.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class UsageError(Exception):
    """The user asked for something that cannot work. The message is all that is printed, so it must say it all."""


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int
    local_rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that prints and writes the files that exist once."""
        return self.rank == 0


def start_world() -> World:
    """Join the job that `torchrun` started, or make a world of one process without it. Collective."""
    # Two backends: tensors on the CPU (flags, messages) go by gloo, so that agreeing on them never waits for a GPU.
    kind = accelerator()
    backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}" if kind else "gloo"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    dist.init_process_group(backend)
    return World(dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size())


def accelerator() -> str:
    """What this machine has beside the CPU, such as "cuda"; "" for nothing, or nothing with collectives of its own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None or found.type == "mps" else found.type


def choose_device(name: str, world: World) -> torch.device:
    """This rank's device for `--device {auto,cpu,cuda}`."""
    kind = accelerator()
    if name == "cpu" or (name == "auto" and not kind):
        return torch.device("cpu")
    found = torch.accelerator.device_count() if name in ("auto", kind) else 0
    if world.local_rank >= found:
        raise UsageError(
            f"this machine has {found} GPU(s), too few for local rank {world.local_rank}: "
            "start fewer processes (torchrun --nproc_per_node) or pass --device cpu"
        )
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(kind, world.local_rank)


def on_every_rank(work: Callable[[], T]) -> T:
    """Return `work()`; if it raised UsageError on any rank, raise the first one's error on all. Collective.

    Without this, the rank that found the mistake would leave and its peers would wait for it in the next collective.
    """
    result: list[T] = []
    message = None
    try:
        result.append(work())
    except UsageError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for found in messages:
        if found is not None:
            raise UsageError(found)
    return result[0]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work()` on rank 0 and return its result on all ranks, or raise its UsageError on all. Collective."""
    result: list[T | None] = [None]

    def only_there() -> None:
        if dist.get_rank() == 0:
            result[0] = work()

    on_every_rank(only_there)
    dist.broadcast_object_list(result, src=0)
    return result[0]  # type: ignore[return-value]  # T itself may be an Optional


def leave(world: World, error: UsageError | None = None, again: bool = False) -> NoReturn:
    """End the process: status 0, or with an error its message, once, and status 2. Collective.

    `again` asks the launcher to start the job once more, by status 75 (EX_TEMPFAIL of sysexits.h): with status 0,
    torchrun would take the job for done.

    No rank leaves before the message is out, since torchrun ends the others as soon as one has failed. (torchrun then
    adds a report of its own below the message.)
    """
    if error is not None and world.leads:
        print(f"error: {error}", file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Not sys.exit: a gloo thread that still has to let go of its last tensor when the interpreter is being torn down
    # aborts the process ("terminate called without an active exception"; torch 2.13, seen in one run of ten).
    # Remove once https://github.com/pytorch/pytorch/pull/179291 or its successor is in.
    os._exit(2 if error is not None else 75 if again else 0)


def crash() -> NoReturn:
    """End this process in an `except` block: print what happened, status 1. The other ranks are not waited for.

    An ordinary end of the interpreter would finish a checkpoint that is being written in the background. After the
    death of another rank that never happens, and as long as this process lives no launcher starts the job again.
    """
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class StopRequest:
    """Turns Ctrl-C (SIGINT), SIGTERM and SIGUSR1 (from Slurm) into a stop that all ranks make after the same step.

    torchrun passes the first two on to its workers, but not in the same step of each: a rank that stopped by itself
    would leave the others waiting. From the first signal on the job has torchrun's --shutdown-timeout (30 s) to end.
    """

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop. Collective; the flag is on the CPU, so a GPU is not waited for."""
        flag = torch.tensor([self._asked], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean over ranks of a scalar. Collective."""
    total = value.detach().double().cpu()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: allocated on its GPU, or resident in its process on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
