"""A background thread that runs tasks in the order in which they were submitted. Layer: optim.

There is only one, so that steps run in the order of the calls, and with a fixed number of torch's own threads below it.
"""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from fsdp2.extras.simulation import simulation


def submit(task: Callable[[], None], threads: int | None) -> "Future[None]":
    """Run `task` in the background, after all tasks submitted before with the same number of threads.

    Args:
        threads: the number of threads that a torch operator may use there; None: as in the caller, not bound to cores.
    """
    if (streams := simulation()) is not None:
        task()  # at once: torch's dispatch modes are thread-local
        with streams.stepping():
            event = streams.record()
        return event if isinstance(event, Future) else _done()
    return _worker(threads or torch.get_num_threads(), threads is not None).submit(task)


def _device_index() -> int | None:
    """The current accelerator; None if the process does not use one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.accelerator.current_device_index()


def _done() -> "Future[None]":
    done: Future[None] = Future()
    done.set_result(None)
    return done


@cache
def _worker(threads: int, is_bound: bool) -> ThreadPoolExecutor:
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2-step")
    before = torch.get_num_threads()
    worker.submit(_prepare, threads, is_bound, _device_index()).result()
    torch.set_num_threads(before)  # the number is thread-local, but new threads get the last one set
    return worker


def _prepare(threads: int, is_bound: bool, device: int | None) -> None:
    if device is not None:  # a thread starts with device 0, and switching back to it would create a context there
        torch.accelerator.set_device_index(device)
    torch.get_num_threads()  # otherwise a thread's first operator would use the number of the process
    torch.set_num_threads(threads)
    if is_bound and sys.platform == "linux":
        cores = cores_for(threads, sorted(os.sched_getaffinity(0)), os.environ)
        if cores:
            os.sched_setaffinity(0, cores)  # for this thread, and for those that it starts


def cores_for(threads: int, cores: list[int], environment: Mapping[str, str]) -> list[int]:
    """The cores for this rank's threads. The ranks of a machine divide them from the last core on. Empty if there are
    not enough to leave each rank one for compute, or if the launcher does not set the local rank."""
    rank, ranks = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (rank.isdecimal() and ranks.isdecimal()) or len(cores) < int(ranks) * (threads + 1):
        return []
    end = len(cores) - int(rank) * threads
    return cores[end - threads : end]
