"""What this process waits for. Layer: watch.

Written by the training thread around each wait and read by the watchdog: two attributes, because waits are many. Waits
of streams, which do not block the thread, are in `Current.queued`.
"""

from collections import deque
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple, Protocol

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
    """Waits of an accelerator's streams, as NCCL's: those that have not ended, oldest first. Added by the training
    thread, looked at by the watchdog.

    Such a wait returns at once: only the current stream waits. So an event is recorded behind it on that stream, and
    the watchdog queries the oldest one. (Handles of collectives keep the results' memory alive.)"""

    def __init__(self) -> None:
        self._waits: deque[tuple[torch.Event, Waiting]] = deque()
        self._lock = Lock()
        self._device_index: int | None = None

    def add(self, awaited: Awaited, place: int, device: torch.device) -> None:
        """The current stream of `device` has been made to wait."""
        waits = self._waits
        with self._lock:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # Nothing waits, and to query an event spoils the capture. What was before it has ended.
                waits.clear()
                return
            # Two at a time, so that few are left, whatever the watchdog does.
            event = None
            for _ in range(2):
                if waits and waits[0][0].query():
                    event = waits.popleft()[0]
            if len(waits) < _MAX_KEPT:
                event, stream = event or torch.Event(device), torch.accelerator.current_stream(device)
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


class Current:
    """The waits that are under way.

    Attributes:
        awaited: what the training thread waits for; None while it does not.
        since: when its last wait began, on the clock of `time.monotonic`.
        has_failed: it has ended with an error, which is being explained.
        queued: the waits of streams.
        failure: the report, once a fault was found; every later error of communication is this one.
        step: the `JointStep` (`fsdp2.watch.joint_step`) that is under way, or None.
    """

    __slots__ = ("awaited", "failure", "has_failed", "queued", "since", "step")

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self.since = 0.0
        self.has_failed = False
        self.queued = Queued()
        self.failure: str | None = None
        self.step: Any = None

    def oldest(self, after_s: float = 0.0) -> Waiting | None:
        """The oldest wait, that of the training thread or of a stream, if it has lasted for `after_s`."""
        awaited, since, queued = self.awaited, self.since, self.queued.oldest(after_s)
        if awaited is not None and (queued is None or self.has_failed or since <= queued.since):
            return Waiting(awaited, since) if monotonic() - since >= after_s else None
        return queued


current = Current()


class waiting:
    """While the block runs, the process waits for `awaited`, or asks why the wait has failed."""

    __slots__ = ("_awaited", "_has_failed")

    def __init__(self, awaited: Awaited, has_failed: bool = False):
        self._awaited = awaited
        self._has_failed = has_failed

    def __enter__(self) -> None:
        current.since = monotonic()
        current.has_failed = self._has_failed
        current.awaited = self._awaited

    def __exit__(self, *_error: object) -> None:
        current.awaited = None
        current.has_failed = False
