"""Work behind the caller's back: one thread that runs tasks in the order in which they were given. Layer: optim.

One thread, so that the order of the steps is that of the calls, and a fixed number of threads of torch's below it.
"""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from fsdp2.extras.simulation import simulation


def submit(task: Callable[[], None], threads: int | None) -> "Future[None]":
    """Run `task` in the background, after all that was given before with the same number of threads.

    Args:
        threads: that an operator of torch may use there; None: as many as in the caller, and not bound to cores.
    """
    if (streams := simulation()) is not None:
        task()  # at once: the modes of torch that see operators are each thread's own
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
    torch.set_num_threads(before)  # the number is the thread's own, but the last one set is that of new threads
    return worker


def _prepare(threads: int, is_bound: bool, device: int | None) -> None:
    if device is not None:  # a thread begins with the first one, and what returns to it makes a context there
        torch.accelerator.set_device_index(device)
    torch.get_num_threads()  # a thread's first operator would take the number of the process
    torch.set_num_threads(threads)
    if is_bound and sys.platform == "linux":
        cores = cores_for(threads, sorted(os.sched_getaffinity(0)), os.environ)
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts


def cores_for(threads: int, cores: list[int], environment: Mapping[str, str]) -> list[int]:
    """The cores for this rank's threads: the ranks of a machine share them out from the last one. Empty if there are
    not enough to leave each rank one for its compute, or if the launcher does not say which rank this is."""
    rank, ranks = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (rank.isdecimal() and ranks.isdecimal()) or len(cores) < int(ranks) * (threads + 1):
        return []
    end = len(cores) - int(rank) * threads
    return cores[end - threads : end]
