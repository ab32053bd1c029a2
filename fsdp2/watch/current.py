"""What the training thread of this process waits for. Layer: watch.

Written by the training thread around each wait and read by the watchdog: two attributes, because waits are many.
"""

from time import monotonic
from typing import Protocol


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


class Current:
    """The wait that is under way.

    Attributes:
        awaited: None while nothing is waited for.
        since: when the last wait began, on the clock of `time.monotonic`.
        has_failed: it has ended with an error, which is being explained.
    """

    __slots__ = ("awaited", "has_failed", "since")

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self.since = 0.0
        self.has_failed = False


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
