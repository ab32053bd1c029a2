"""`InFlight`: the reductions of one root that are in flight, the one that goes on next first. Layer: runtime."""

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from fsdp2._torch import profiler_is_on
from fsdp2.events import profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.runtime.reduction import Reduction


class InFlight:
    """Owns every reduction, and so its buffers, until it is finished. Several roots may share one."""

    def __init__(self) -> None:
        self._limits: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._max_reductions = 1
        self._reductions: deque[Reduction] = deque()

    def limit(self, user: object, max_reductions: int) -> None:
        """`user` allows this many reductions in flight before compute waits for the oldest; the largest number
        applies."""
        self._limits[user] = max_reductions
        self._max_reductions = max(self._limits.values())

    def start(self, reductions: Sequence[Reduction]) -> None:
        """Start reductions. If too many are in flight, the oldest advance first."""
        for reduction in reductions:
            num_due = len(self._reductions) - self._max_reductions + 1
            if num_due > 0:
                with profiler_range("FSDP::post_backward_rs_wait", reduction.fqn) if profiler_is_on() else NOTHING:
                    for _ in range(num_due):
                        self._advance_oldest()
            with profiler_range("FSDP::post_backward_reduce", reduction.fqn) if profiler_is_on() else NOTHING:
                if reduction.advance():
                    self._reductions.append(reduction)

    def fqns_of(self, params: set[int]) -> list[str]:
        """The units that have reductions in flight for parameters with these ids."""
        return [each.fqn for each in self._reductions if any(param.is_among(params) for param in each.params)]

    def _advance_oldest(self) -> None:
        """A separate function, so that a finished reduction is freed before the next one allocates its buffers."""
        oldest = self._reductions.popleft()
        if oldest.advance():
            self._reductions.append(oldest)

    def finish_partials(self) -> None:
        """Finish the reductions whose results the next all-reduce must include."""
        while any(reduction.leaves_partials for reduction in self._reductions):
            self._reductions.popleft().finish()

    def finish_all(self) -> None:
        """Finish every reduction."""
        while self._reductions:
            self._reductions.popleft().finish()

    def abandon_all(self) -> None:
        """Finish every reduction without changing a gradient."""
        while self._reductions:
            self._reductions.popleft().abandon()
