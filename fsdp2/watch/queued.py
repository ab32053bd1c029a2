"""Waits of an accelerator's streams, as NCCL's: those that have not ended, oldest first. Layer: watch.

Such a wait returns at once: only the current stream waits. So an event is recorded behind it on that stream, and the
watchdog queries the oldest event: has the stream come there? Handles of collectives could be queried without events,
but they keep the results' memory alive.
"""

from collections import deque
from threading import Lock
from time import monotonic
from typing import NamedTuple, Protocol

import torch

_MAX_KEPT = 4096  # a device's queue is full before


class Awaited(Protocol):
    """What can be waited for.

    Attributes:
        what: the operation.
        fqn: the unit; None if it is about no unit.
        group_name: the process group's.
    """

    what: str
    fqn: str | None
    group_name: str


class Waiting(NamedTuple):
    """A wait.

    Attributes:
        since: when it began, on the clock of `time.monotonic`.
        place: of its entry in the group's trail, for a wait of a stream: the process goes on, and may make the same
            exchange again; -1 for a wait of the process.
    """

    awaited: Awaited
    since: float
    place: int = -1


class Queued:
    """The waits of one process. Added by the training thread, looked at by the watchdog."""

    def __init__(self) -> None:
        self._waits: deque[tuple[torch.Event, Waiting]] = deque()
        self._lock = Lock()
        self._device_index: int | None = None

    def add(self, awaited: Awaited, place: int, device: torch.device) -> None:
        """The current stream of `device` has been made to wait."""
        waits, spare = self._waits, None
        with self._lock:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # Nothing waits, and to query an event spoils the capture. What was before it has ended.
                waits.clear()
                return
            # Two at a time, so that few are left, whatever the watchdog does.
            if waits and waits[0][0].query():
                spare = waits.popleft()[0]
                if waits and waits[0][0].query():
                    waits.popleft()
            elif len(waits) == _MAX_KEPT:
                waits.pop()  # the oldest is what others are asked about, and the last shows whether there is any
            event, stream = torch.Event(device) if spare is None else spare, torch.accelerator.current_stream(device)
            event.record(stream)
            self._device_index = stream.device_index
            waits.append((event, Waiting(awaited, monotonic(), place)))

    def oldest(self, after_s: float) -> Waiting | None:
        """The oldest wait that has not ended, if it has lasted for `after_s`. Younger ones are not looked at."""
        with self._lock:
            try:
                if self._device_index is not None:  # a thread begins with the first, where events would make a context
                    torch.accelerator.set_device_index(self._device_index)
                while self._waits:
                    event, wait = self._waits[0]
                    if monotonic() - wait.since < after_s:
                        break
                    if not event.query():
                        return wait
                    self._waits.popleft()
            except RuntimeError:  # a kernel has failed, and no call of the device works any more: this is no wait
                self._waits.clear()
        return None
