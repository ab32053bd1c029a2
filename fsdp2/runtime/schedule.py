"""The order of units: what ran, what runs next, what may be freed. Pure: no tensor, no stream. Layer: runtime.

Forward order is recorded in each iteration, in one `Pass` for each forward of the root. A unit's backward hook keeps
the unit's position in that pass. So prefetching in backward follows the reverse of the actual order, even if a unit ran
twice, two forwards share one backward, or a forward had no backward. Explicit lists override it.

One iteration of a root with units 0, 1, 2 that reshard after forward (time runs right; ``A`` all-gather, ``C`` compute,
``R`` reduction; entries in one column may overlap)::

    forward   compute stream       C0  C1  C2
              gather stream    A0  A1  A2            A1 is issued before C0 ends: the CPU is ahead
    backward  compute stream       C2  C1  C0
              gather stream    A2  A1  A0            A1 is issued by unit 2, before its compute
              reduce stream            R2  R1  R0    R2 starts at unit 2's last gradient
"""

from collections.abc import Sequence
from typing import Any


class Pass:
    """The units that one forward ran, in the order in which they finished. `notes`: what features keep of it for its
    backward, by names of their own."""

    def __init__(self, notes: dict[str, Any] | None = None) -> None:
        self.notes: dict[str, Any] = {} if notes is None else notes
        self._order: list[Any] = []

    def record(self, unit: object) -> int:
        """Record that `unit` finished its forward. Returns its position, which its backward passes to `before`."""
        self._order.append(unit)
        return len(self._order) - 1

    def before(self, position: int) -> Any:
        """The unit whose backward follows that of the unit at `position`; None for the first. The same unit several
        times in a row counts once, because the modules of a list finish one by one."""
        unit = self._order[position]
        return next((other for other in reversed(self._order[:position]) if other is not unit), None)


class Schedule:
    """The schedule of one root. `notes` are those of the forward that runs, or of the one whose backward runs.
    `in_root_forward`: the root's forward is running."""

    def __init__(self) -> None:
        self._pass = Pass()
        self.notes = self._pass.notes
        self.in_root_forward = False

    def begin_forward(self) -> None:
        """The root's forward starts: a new pass."""
        self._pass = Pass()
        self.notes = self._pass.notes
        self.in_root_forward = True

    def end_forward(self) -> None:
        """The root's forward is over; from now on only the backward hooks keep its pass alive."""
        self._pass = Pass()
        self.in_root_forward = False

    def finished(self, unit: object) -> tuple[Pass, int]:
        """`unit` finished a forward: return the pass and the position for its backward. A forward outside of the root's
        (a unit called alone, a recomputation) has its own pass, because what ran before it is unrelated to its
        backward."""
        current = self._pass if self.in_root_forward else Pass(self.notes)
        return current, current.record(unit)

    @staticmethod
    def backward_targets(explicit: Sequence[Any], current: Pass, position: int) -> Sequence[Any]:
        """The units to prefetch in a unit's backward, once its own parameters are available: its explicit list,
        otherwise the unit that ran just before it in forward."""
        if explicit:
            return explicit
        implicit = current.before(position)
        return () if implicit is None else (implicit,)


def num_kept(prefetching: bool) -> int:
    """How many resharded units may keep their storage when another unit unshards, so that two storages are alive. One
    if the unit unshards for itself: the unit before it may still compute. None if it is prefetched: the unit that
    prefetches computes."""
    return 0 if prefetching else 1
