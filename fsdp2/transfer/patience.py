"""A time limit for waits on a slow rank. Layer: transfer."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.watch.watchdog import Watchdog, watchdog


@contextmanager
def patience(seconds: float, what: str) -> Iterator[None]:
    """If the block takes longer than this, end all communication of this process with a `CollectiveError` that says
    what the other ranks are doing. (Without a watchdog, the process group's timeout ends it, without this report.)"""
    dog = watchdog()
    if dog is None:
        yield
        return
    timer = threading.Timer(seconds, _give_up, (dog, seconds, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(dog: Watchdog, seconds: float, what: str) -> None:
    before, deadline = dog.num_rounds, time.monotonic() + 5
    dog.ask()
    while dog.num_rounds <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    dog.fail(f"{what}: waited for {seconds:.0f} s for a rank whose consumer is slow. {dog.last_finding}")
