"""What this process waits for. Layer: watch.

The training thread writes it around each wait, and the watchdog reads it. Waits are frequent, so a wait sets only two
attributes. Waits of streams, which do not block the thread, are in `Current.queued`.
"""

from collections import deque
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch

_MAX_KEPT = 4096  # a device's queue is full earlier


class Awaited(Protocol):
    """What can be waited for.

    Attributes:
        what: the operation.
        fqn: the unit; None if it belongs to no unit.
        group_name: the name of the process group.
    """

    what: str
    fqn: str | None
    group_name: str


class Waiting(NamedTuple):
    """A wait.

    Attributes:
        since: when it began, on the clock of `time.monotonic`.
        place: the place of its entry in the group's trail, for a wait of a stream, because the process continues and
            may make the same exchange again; -1 for a wait of the process.
    """

    awaited: Awaited
    since: float
    place: int = -1


class Queued:
    """Waits of an accelerator's streams (NCCL) that have not ended, oldest first. The training thread adds them, the
    watchdog reads them.

    Such a wait returns at once, and only the current stream waits. So an event is recorded behind it on that stream,
    and the watchdog queries the oldest event. (Handles of collectives would keep the results' memory alive.)"""

    def __init__(self) -> None:
        self._waits: deque[tuple[torch.Event, Waiting]] = deque()
        self._lock = Lock()
        self._device_index: int | None = None

    def add(self, awaited: Awaited, place: int, device: torch.device) -> None:
        """The current stream of `device` has been made to wait."""
        waits = self._waits
        with self._lock:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # During a capture nothing waits, and querying an event would break it. Earlier waits have ended.
                waits.clear()
                return
            # Remove up to two for each one added, so that few are left, whatever the watchdog does.
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
        """The oldest wait that has not ended, if it has lasted for `after_s`. Younger ones are not queried."""
        with self._lock:
            try:
                if self._device_index is not None:  # a thread starts with device 0, where events would make a context
                    torch.accelerator.set_device_index(self._device_index)
                while self._waits:
                    event, wait = self._waits[0]
                    if monotonic() - wait.since < after_s:
                        break
                    if not event.query():
                        return wait
                    self._waits.popleft()
            except RuntimeError:  # a kernel has failed, so calls of the device fail: this is not a wait
                self._waits.clear()
        return None


class Current:
    """The current waits.

    Attributes:
        awaited: what the training thread waits for; None if it does not.
        since: when its last wait began, on the clock of `time.monotonic`.
        has_failed: the wait has ended with an error, which is being explained.
        queued: the waits of streams.
        failure: the report, once a fault was found; all later communication errors have this text.
        step: the current `JointStep` (`fsdp2.watch.joint_step`), or None.
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
        """The oldest wait of the training thread or of a stream, if it has lasted for `after_s`."""
        awaited, since, queued = self.awaited, self.since, self.queued.oldest(after_s)
        if awaited is not None and (queued is None or self.has_failed or since <= queued.since):
            return Waiting(awaited, since) if monotonic() - since >= after_s else None
        return queued


current = Current()


class waiting:
    """In the block, the process waits for `awaited`, or asks why the wait has failed."""

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
