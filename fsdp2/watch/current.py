"""What the training thread of this process waits for. Layer: watch.

Written by the training thread around each wait and read by the watchdog: two attributes, because waits are many.
"""

from time import monotonic
from typing import Protocol

from fsdp2.watch.board import Board


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
    """The wait that is under way.

    Attributes:
        awaited: None while nothing is waited for.
        since: when the last wait began, on the clock of `time.monotonic`.
        has_failed: it has ended with an error, which is being explained.
        step: the step that all ranks make or none, while one is under way.
    """

    __slots__ = ("awaited", "has_failed", "since", "step")

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self.since = 0.0
        self.has_failed = False
        self.step: Joint | None = None


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
