"""A few threads that share a list of work. Layer: checkpoint.

It does not use `concurrent.futures`, whose threads accept no work once the interpreter shuts down: a background save
may finish during shutdown.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import torch

__all__ = ["run_all"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(work: Callable[[Item], Result], items: Iterable[Item], num_threads: int, name: str) -> list[Result]:
    """``[work(item) for item in items]``, on several threads. Items are taken in order, as late as possible.

    Returns when no thread is working any more. After an error, no further item is started.

    Args:
        name: the name of the threads.

    Raises:
        BaseException: the first error of `work`, or an interruption of the calling thread.
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
            except RuntimeError:  # no thread is available, or (Python 3.12.0 and .1) the interpreter is shutting down
                threads.pop()
                loop()
                break
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        errors.insert(0, error)
        for thread in threads:
            if thread.is_alive():  # otherwise it has ended, or will see the error and do nothing
                thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]


_pool_of_process: int | None = None


def _make_thread_pool_of_torch() -> None:
    """Let one new thread use torch before several do. After a fork, the first thread that uses torch recreates torch's
    thread pool without a lock; if several start at once, some find no pool ("Invalid thread pool!").
    `set_num_threads` would create the pool too, but also changes how MKL splits products, in the whole process."""
    global _pool_of_process
    if _pool_of_process != os.getpid():
        thread = threading.Thread(target=torch.get_num_threads, name="fsdp2-first")
        with suppress(RuntimeError):  # as above
            thread.start()
            thread.join()
            _pool_of_process = os.getpid()
