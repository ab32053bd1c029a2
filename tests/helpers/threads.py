"""Many ranks without processes: as threads of this one, or as one rank of a world that only exists on paper."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.testing._internal.distributed.fake_pg import FakeStore

Result = TypeVar("Result")


def run_threads(world_size: int, fn: Callable[[int, int], Result], timeout_s: float = 60.0) -> list[Result]:
    """Call `fn(rank, world_size)` on `world_size` threads that see each other as ranks; the results in rank order.

    All ranks share one CPU generator, so build models before, or from numbers that do not depend on it.

    Raises:
        RuntimeError: some ranks raised or did not finish; the first failing rank's exception is the cause.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = fn(rank, world_size)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            with contextlib.suppress(AttributeError):  # of torch 2.11, whose world of a thread has no `comms`
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        threaded.ProcessLocalGroup.reset()
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    real = {rank: error for rank, error in sorted(errors.items()) if not isinstance(error, SystemExit)}
    if real:
        rank, error = next(iter(real.items()))
        others = f"failed: {list(real)}, stuck: {stuck}"
        raise RuntimeError(f"rank {rank} of {world_size} threads failed: {error!r}; {others}") from error
    if stuck or errors:
        raise RuntimeError(f"ranks {stuck} of {world_size} threads did not finish in {timeout_s:g} s")
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process as `rank` of `world_size` on the `fake` backend: collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
