"""`Trail`: what this rank has done in one process group, in order. Layer: watch.

Each exchange with the other ranks is an `Entry`, which all ranks of the group must make at the same place. An entry is
recorded as a number that is equal in all processes, so recording is one `list.append`, and a sequence of entries is
compared by a hash of their numbers.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from fsdp2.comm.base import hash_of

MAX_KEPT = 8192  # entries: several steps of a model with a hundred units
MAX_KNOWN = 10_000


class Entry(NamedTuple):
    """One exchange.

    Attributes:
        operation: "all-gather", "reduce-scatter", "all-reduce", ... ; "optimizer step", which exchanges nothing but
            must happen at the same place.
        unit: FQN of the unit, ``""`` for the root; None if it belongs to no unit.
        numel: elements, of all ranks or of one as in `fsdp2.events.Event`; padding included.
        nbytes: the same in bytes on the wire.
        dtype: on the wire; "" if there are several.
    """

    operation: str
    unit: str | None
    numel: int = 0
    nbytes: int = 0
    dtype: str = ""

    def __str__(self) -> str:
        whose = "" if self.unit is None else f" of unit '{self.unit or '(root)'}'"
        size = f" ({self.nbytes} bytes{', ' * bool(self.dtype)}{self.dtype})" if self.nbytes else ""
        return self.operation + whose + size


_entries: dict[int, Entry] = {}


def number_of(entry: Entry) -> int:
    """The number of `entry`, equal in all processes."""
    number = hash_of(*entry)
    _entries[number] = entry
    return number


def entry_of(number: int) -> Entry:
    """The entry that `number_of` gave this number in this process."""
    return _entries.get(number, Entry("something", None))


class Trail:
    """The entries of one process group.

    Attributes:
        name: the group's name, equal on all of its ranks.
        ranks: its global ranks.
        numbers: the numbers of the kept entries, oldest first.
        num_dropped: the number of entries before these.
        has_reduced: gradients were reduced since the last `mark`.
        num_marks: how many calls of `mark` found new entries.
        last_held: the key of the last comparison for which ranks waited.
        known: number -> the `Watched` (`fsdp2.watch.exchange`) collective last planned with it.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.name = f"{group.group_desc}:{group.group_name}"
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.numbers: list[int] = []
        self.num_dropped = 0
        self.has_reduced = False
        self.num_marks = 0
        self.last_held = ""
        self.known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._marked = 0
        self._total = 0
        self._step = 0
        self._marks_in_step = 0
        self._known: set[int] = set()
        self._forgetting = threading.Lock()

    @property
    def position(self) -> int:
        """The number of entries so far."""
        return self.num_dropped + len(self.numbers)

    def end(self, most: int) -> tuple[int, list[int]]:
        """The position and the last numbers before it, consistent while the training thread continues: for the
        watchdog."""
        with self._forgetting:
            numbers = self.numbers[:]
            return self.num_dropped + len(numbers), numbers[-most:]

    def note(self, entry: Entry) -> None:
        """Record an entry that is too rare to compute its number in advance."""
        self.numbers.append(number_of(entry))

    def take_back(self) -> None:
        """Remove the last entry, whose exchange did not start."""
        with self._forgetting:
            self.numbers.pop()

    def mark(self, ends_step: bool) -> tuple[int, int, bool]:
        """A point at which ranks are compared: (position, hash of all entries up to it, whether the entries since the
        last step are new). Ranks that have done the same since a common mark have the same hash.

        A step ends where an optimizer steps; in a program without a torch optimizer, at every 64th mark."""
        new = tuple(self.numbers[self._marked - self.num_dropped :])
        self._step, self._total = hash((self._step, new)), hash((self._total, new))
        self._marked = self.position
        self.num_marks += bool(new)
        self.has_reduced = False
        step, is_new = self._step, bool(new) and self._step not in self._known
        self._marks_in_step += 1
        if ends_step or self._marks_in_step >= 64:
            self._step = self._marks_in_step = 0
        if is_new:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known.add(step)
        return self.position, self._total, is_new

    def reset(self) -> None:
        """All ranks have equally many entries, but not the same ones: compare only what follows."""
        self._known.clear()
        self._marked = self.position
        self._total = self.position
        self._step = self._marks_in_step = self.num_marks = 0
        self.has_reduced = False

    def forget(self) -> None:
        """Drop the oldest entries, if there are too many."""
        if len(self.numbers) > MAX_KEPT:
            if self._marked < self.position - MAX_KEPT // 2:
                self.mark(ends_step=False)
            excess = len(self.numbers) - MAX_KEPT // 2
            with self._forgetting:
                del self.numbers[:excess]
                self.num_dropped += excess


_trails: WeakKeyDictionary[dist.ProcessGroup, Trail] = WeakKeyDictionary()


def trail_of(group: dist.ProcessGroup) -> Trail:
    """The trail of `group`, begun at the first call."""
    trail = _trails.get(group)
    if trail is None:
        trail = _trails[group] = Trail(group)
    return trail


def trails() -> list[tuple[dist.ProcessGroup, Trail]]:
    """All groups of more than one rank in which this process has exchanged something, with their trails."""
    groups = [group for each in _trails.keyrefs() if (group := each()) is not None]  # other threads may begin some
    return [(group, trail) for group in groups if (trail := _trails.get(group)) is not None and len(trail.ranks) > 1]


def forget_other_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Forget trails of groups other than `groups`: a model may keep destroyed groups alive."""
    for group in set(_trails) - set(groups):
        del _trails[group]


def forget_old_entries() -> None:
    """Limit the length of all trails. Called once per root forward, so that it applies to programs without backwards
    too."""
    for trail in _trails.values():
        trail.forget()
