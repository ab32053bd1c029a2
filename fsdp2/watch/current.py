"""What this process waits for. Layer: watch.

Written by the training thread around each wait and read by the watchdog: two attributes, because waits are many. Waits
of streams, which do not block the thread, are in `Current.queued`.
"""

from time import monotonic
from typing import Protocol

from fsdp2.watch.board import Board
from fsdp2.watch.queued import Awaited, Queued, Waiting


class Joint(Protocol):
    """A step that all ranks make, or none (`fsdp2.watch.joint_step`).

    Attributes:
        failure: what a rank said that failed; None while none is known to have.
    """

    failure: str | None

    def begin_exchange(self) -> None: ...
    def check(self) -> None: ...
    def look(self, board: Board) -> str | None: ...


class Current:
    """The waits that are under way.

    Attributes:
        awaited: what the training thread waits for; None while it does not.
        since: when its last wait began, on the clock of `time.monotonic`.
        has_failed: it has ended with an error, which is being explained.
        queued: the waits of streams.
        failure: the report, once a fault was found; every later error of communication is this one.
        step: the step that all ranks make or none, while one is under way.
    """

    __slots__ = ("awaited", "failure", "has_failed", "queued", "since", "step")

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self.since = 0.0
        self.has_failed = False
        self.queued = Queued()
        self.failure: str | None = None
        self.step: Joint | None = None

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
