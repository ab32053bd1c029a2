"""Compares the trails of all ranks: which ranks differ, and which are missing. Pure. Layer: watch.

A trail only grows (except that an entry is taken back if its exchange could not start for lack of memory). So two ranks
with different entries at the same place of a group have done different things, no matter when they were asked. Other
differences may be transient: a rank with fewer entries may only be late. It is at fault if it is gone, or if it waits
for a rank that waits for it.

A rank that waits for bytes in flight waits for no other rank: all have begun what it waits for.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdp2.watch.trail import Entry


@dataclass(frozen=True)
class Past:
    """What one rank has done in one group.

    Attributes:
        ranks: the group's ranks.
        first: the place of `entries[0]`; older entries are not kept.
    """

    ranks: tuple[int, ...]
    first: int
    entries: tuple[Entry, ...]

    @property
    def end(self) -> int:
        """The number of entries so far."""
        return self.first + len(self.entries)

    def at(self, place: int) -> Entry | None:
        """The entry at `place`; None if it is not kept or has not happened."""
        return self.entries[place - self.first] if self.first <= place < self.end else None

    def place_of(self, wait: "Wait") -> int:
        """The place of the entry to which `wait` belongs; that of the last entry, if it belongs to all of them."""
        if wait.place >= 0:
            return wait.place
        found = [place for place, each in enumerate(self.entries, self.first) if each[:2] == (wait.what, wait.unit)]
        return found[-1] if found else self.end - 1


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        has_failed: the backend has ended the wait with an error.
        place: the place of its entry in the group, for a wait of a stream; -1 for one of the process.
    """

    group: str
    what: str
    unit: str | None
    has_failed: bool = False
    place: int = -1

    def __str__(self) -> str:
        whose = "" if self.unit is None else f" of unit '{self.unit or '(root)'}'"
        return f"{self.what}{whose} in group '{self.group}'"


@dataclass(frozen=True)
class Answer:
    """One rank's report about itself.

    Attributes:
        wait: its wait; None if it does not wait for other ranks, as far as fsdp2 knows.
        line: the line of the program at which its main thread is.
    """

    rank: int
    pasts: Mapping[str, Past] = field(default_factory=dict)
    wait: Wait | None = None
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        """The answer as dicts and lists."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Answer":
        """The inverse of `to_json`, even after the keys of dicts became strings."""
        pasts = {
            name: Past(tuple(past["ranks"]), past["first"], tuple(Entry(*entry) for entry in past["entries"]))
            for name, past in found["pasts"].items()
        }
        wait = None if found["wait"] is None else Wait(**found["wait"])
        return Answer(found["rank"], pasts, wait, found["line"])


@dataclass(frozen=True)
class Finding:
    """The result.

    Attributes:
        kind: "fine"; "late": a rank that others wait for is alive and elsewhere; "unclear": ranks wait for each other,
            which is a deadlock if it persists; "differ", "gone", "deadlock": faults.
        agreed: for each group, the number of entries that are known to be the same on all its ranks.
        moved: what each waiting rank waits for, and its place in each group; equal in two findings if nothing moved.
    """

    kind: str
    text: str = ""
    agreed: Mapping[str, int] = field(default_factory=dict)
    moved: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether waiting longer cannot help."""
        return self.kind in ("differ", "gone", "deadlock")


def examine(answers: Mapping[int, Answer], gone: Mapping[int, str], before: Finding | None = None) -> Finding:
    """Compare the ranks.

    Args:
        answers: the answers of live ranks, and the last answers of ranks that have ended.
        gone: the dead ranks, and what is known about each.
        before: the finding from some seconds ago.
    """
    groups: dict[str, dict[int, Past]] = {}
    for rank, answer in answers.items():
        for name, past in answer.pasts.items():
            groups.setdefault(name, {})[rank] = past
    differing = [text for name, pasts in groups.items() if (text := _first_difference(name, pasts))]
    if differing:
        return Finding("differ", "\n".join(differing))
    agreed = {
        name: min(past.end for past in pasts.values())
        for name, pasts in groups.items()
        if pasts.keys() >= set(_ranks_of(pasts))
    }
    waiting = {rank: answer.wait for rank, answer in answers.items() if answer.wait is not None and rank not in gone}
    blockers = _blockers(groups, waiting, gone)
    missing = sorted(set().union(*blockers.values()))
    ends = [(name, rank, past.end) for name, pasts in groups.items() for rank, past in pasts.items()]
    moved = repr((sorted((rank, str(wait)) for rank, wait in waiting.items()), sorted(ends)))
    if culprits := [rank for rank in missing if rank in gone]:
        kind, lines = "gone", [f"{_rank(rank)} {gone[rank]}" for rank in culprits]
    elif idle := [rank for rank in missing if rank not in waiting]:
        kind, lines = (
            "late",
            [f"{_rank(rank)} is alive but has not arrived; {_where(answers.get(rank))}" for rank in idle],
        )
    elif not missing or not all(blockers.get(rank) for rank in missing):
        return Finding("fine", "", agreed, moved)
    elif before is None or before.moved != moved:
        return Finding("unclear", "", agreed, moved)
    else:
        kind, lines = "deadlock", ["ranks wait for each other:"]
    return Finding(kind, "\n".join(lines + _of_waiting(waiting)), agreed, moved)


def _first_difference(name: str, pasts: Mapping[int, Past]) -> str:
    """A description of the first place at which two ranks have different entries, or ""."""
    start = max(past.first for past in pasts.values())
    for place in range(start, max(past.end for past in pasts.values())):
        by_entry: dict[Entry, list[int]] = {}
        for rank, past in pasts.items():
            if (entry := past.at(place)) is not None:
                by_entry.setdefault(entry, []).append(rank)
        if len(by_entry) > 1:
            lines = [f"ranks did different things in group '{name}' ({_rank(*_ranks_of(pasts))}), at entry {place}:"]
            lines += [f"  {_rank(*ranks)}: {entry}" for entry, ranks in by_entry.items()]
            if any(entry.operation == "optimizer step" for entry in by_entry):
                lines.append("  For ranks with different numbers of microbatches there is fsdp2.join.")
            return "\n".join(lines)
    return ""


def _ranks_of(pasts: Mapping[int, Past]) -> tuple[int, ...]:
    return next(iter(pasts.values())).ranks


def _blockers(
    groups: Mapping[str, Mapping[int, Past]], waiting: Mapping[int, Wait], gone: Mapping[int, str]
) -> dict[int, set[int]]:
    """For each waiting rank the ranks for which it waits: members of the group that have not begun what it waits for.
    If its wait has failed, or is one of a stream, also dead members: what they had begun has not ended."""
    found: dict[int, set[int]] = {}
    for waiter, wait in waiting.items():
        pasts = groups.get(wait.group, {})
        if waiter in pasts:
            place = pasts[waiter].place_of(wait)
            others = set(_ranks_of(pasts)) - {waiter}
            absent = {rank for rank in others if rank not in pasts or pasts[rank].end <= place}
            found[waiter] = absent | (others & gone.keys() if wait.has_failed or wait.place >= 0 else set())
    return found


def _of_waiting(waiting: Mapping[int, Wait]) -> list[str]:
    by_wait: dict[str, list[int]] = {}
    for rank, wait in sorted(waiting.items()):
        by_wait.setdefault(str(wait), []).append(rank)
    return [f"  {_rank(*ranks)} wait{'s' * (len(ranks) == 1)} for {what}" for what, ranks in by_wait.items()]


def _where(answer: Answer | None) -> str:
    return "it has not answered yet" if answer is None else f"it is at {answer.line}"


def _rank(*ranks: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f", ... ({len(ranks)})" if len(ranks) > 16 else "")
