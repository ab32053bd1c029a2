"""A few threads that share a list of work. Layer: checkpoint.

Not `concurrent.futures`: its threads take no more work once the interpreter has begun to end, and a background save is
allowed to finish then.
"""

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

__all__ = ["run_all"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(work: Callable[[Item], Result], items: Iterable[Item], num_threads: int, name: str) -> list[Result]:
    """``[work(item) for item in items]``, on several threads. Items are taken in order, as late as possible.

    Returns when no thread works any more, also after an error; then no further item is begun.

    Args:
        name: of the threads.

    Raises:
        BaseException: the first error of `work`, or an interruption of the thread that calls.
    """
    _make_thread_pool_of_torch()
    pending = enumerate(items)
    lock = threading.Lock()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def loop() -> None:
        while not errors:
            try:
                with lock:
                    following = next(pending, None)
                if following is None:
                    return
                results[following[0]] = work(following[1])
            except BaseException as error:
                errors.append(error)

    threads: list[threading.Thread] = []
    try:
        for number in range(num_threads):
            threads.append(threading.Thread(target=loop, name=f"{name}-{number}"))
            try:
                threads[-1].start()
            except RuntimeError:  # a limit on threads, or (Python 3.12.0 and .1) the interpreter has begun to end
                threads.pop()
                loop()
                break
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        errors.insert(0, error)
        for thread in threads:
            if thread.is_alive():  # else it has ended, or begins after the error is known and does nothing
                thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]


_pool_of_process: int | None = None


def _make_thread_pool_of_torch() -> None:
    """Let one new thread begin with torch before several do.

    After a fork torch makes its thread pool again, in the first thread that had not used torch yet, and without a lock:
    when several begin at once, some find no pool ("Invalid thread pool!"). That torch asks for the number of threads
    after every fork does not help where the parent's main thread had asked already. Not `set_num_threads`, which makes
    the pool too, but also ends that MKL may take fewer threads for a product, in the whole process.
    """
    global _pool_of_process
    if _pool_of_process == os.getpid():
        return
    thread = threading.Thread(target=torch.get_num_threads, name="fsdp2-first")
    try:
        thread.start()
    except RuntimeError:  # as above
        return
    thread.join()
    _pool_of_process = os.getpid()
