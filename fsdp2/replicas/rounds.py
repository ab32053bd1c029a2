"""`Rounds`: which replicas take part in a step. Layer: replicas.

All replicas share a store, in which one value is the last round, replaced by compare-and-set::

    round      {"number": 7, "members": [A, B]}     until one replica replaces it by number 8
    here/8     A, C                                 the replicas that have arrived for round 8
    beat/B/0   "41"                                 rank 0 of B is alive: the number grows

A replica that sees that all members of the last round are here, or that the missing ones are dead, proposes the next
round. The first proposal counts for all. A replica that is late or new joins the round after that.
"""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp2.errors import CollectiveError, MismatchError

_KEPT = 8  # rounds whose keys are kept
_FOREVER = timedelta(days=3650)


class Member(NamedTuple):
    """A replica in a round.

    Attributes:
        step, since: its number of steps, and the round that ended the last one. For equal steps the later round counts.
        is_well: its last reduction succeeded.
        kind: what it trains, and on how many ranks.
    """

    name: str
    step: int
    since: int
    is_well: bool
    kind: str


class Round(NamedTuple):
    """The replicas that take part in a step.

    Attributes:
        number: counted from 1.
        made: the round in which the members made their process groups; they keep these until one fails.
        proposer: the replica that has written it.
    """

    number: int = 0
    members: tuple[Member, ...] = ()
    made: int = 0
    proposer: str = ""

    @property
    def names(self) -> list[str]:
        """The names of its members, in rank order of their process groups."""
        return [member.name for member in self.members]

    def healthy(self, is_first_alone: bool) -> list[str]:
        """The members with the most steps. `is_first_alone`: before the first step, only the first member."""
        farthest = max(member[1:3] for member in self.members)
        found = [member.name for member in self.members if member[1:3] == farthest]
        return found[:1] if is_first_alone and farthest == (0, 0) else found


def _parse(text: str) -> Round:
    number, members, made, proposer = json.loads(text)
    return Round(number, tuple(Member(*each) for each in members), made, proposer)


def open_store(address: str, timeout: timedelta) -> Any:
    """A client of the store at ``host:port``."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), None, False, timeout, False)  # type: ignore[attr-defined]  # public


class Beat:
    """A thread that sends heartbeats of this process.

    Args:
        store: a client for this thread only.
    """

    def __init__(self, store: Any, key: str, every_s: float):
        self._store, self._key, self._every_s = store, key, every_s
        self._stop = threading.Event()
        store.set(key, "0")
        self._thread = threading.Thread(target=self._run, name="fsdp2-replica", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with suppress(RuntimeError):  # the store is gone, which the next round reports
            while not self._stop.wait(self._every_s):
                number += 1
                self._store.set(self._key, str(number))

    def end(self) -> None:
        """The process leaves, so that others need not wait for it."""
        self._stop.set()
        self._thread.join(10.0)
        with suppress(RuntimeError):
            self._store.set(self._key, "left")


class Rounds:
    """The rounds, from the view of one rank of one replica.

    Args:
        name: the replica's name, never used by another or an earlier one.
        num_ranks: the number of ranks of each replica.
        patience_s: a rank without a heartbeat for this long is dead.
        timeout_s: how long the members of the last round wait for one that is alive.

    Attributes:
        store: this thread's client.
        stopped: set when the process leaves.
    """

    def __init__(self, store: Any, name: str, num_ranks: int, patience_s: float, timeout_s: float, min_replicas: int):
        self.store = store
        self.stopped = threading.Event()
        self._name, self._num_ranks, self._min_replicas = name, num_ranks, min_replicas
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._number = 0  # the last round that this replica was in
        self._beats: dict[str, tuple[list[bytes], float]] = {}
        store.compare_set("round", "", json.dumps(Round()))

    def current(self) -> Round:
        """The last decided round."""
        return _parse(bytes(self.store.get("round")).decode())

    def follow(self, count: int) -> Round:
        """On ranks other than 0: the result of call number `count` of `join` on rank 0."""
        self.store.wait([f"in/{self._name}/{count}"], _FOREVER)
        text = bytes(self.store.get(f"in/{self._name}/{count}")).decode()
        if not text.startswith("["):
            raise MismatchError(text)
        return _parse(text)

    def join(self, count: int, me: Member) -> Round:
        """On rank 0: take part in the next round. Returns it once it is decided. Raises `MismatchError`, on all ranks,
        if the other replicas train something else."""
        last = self.current()
        while last.number <= self._number or me.name not in last.names:
            if why := self._differs(last, me):
                self.store.set(f"in/{self._name}/{count}", why)
                raise MismatchError(why)
            last = self._next(last, me)
        self._number = last.number
        self.store.set(f"in/{self._name}/{count}", json.dumps(last))
        self.store.delete_key(f"in/{self._name}/{count - 2}")
        return last

    def _differs(self, last: Round, me: Member) -> str:
        """The error message if live replicas train something else, or ""."""
        start = time.monotonic()
        while last.members and last.members[0].kind != me.kind and not all(map(self._is_dead, last.names)):
            if self.current() != last or time.monotonic() - start > 2 * self._patience_s:
                return (
                    f"replicas: the others at this store have {last.members[0].kind}, this one has {me.kind}. All need "
                    "the same model and number of ranks; use another store for another model"
                )
            self.stopped.wait(0.02)
        return ""

    def _next(self, last: Round, me: Member) -> Round:
        """The round after `last`, with or without this replica."""
        number, start, pause = last.number + 1, time.monotonic(), 0.001
        self.store.append(f"here/{number}", json.dumps(me) + "\n")
        while (found := self.current()) == last:
            here = [Member(*json.loads(line)) for line in bytes(self.store.get(f"here/{number}")).split(b"\n")[:-1]]
            if self._must_decide(last, [member.name for member in here], time.monotonic() - start):
                proposed = json.dumps(self._proposal(last, here))
                answer = bytes(self.store.compare_set("round", json.dumps(last), proposed)).decode()
                if answer == proposed:
                    self.store.delete_key(f"here/{number - _KEPT}")
                return _parse(answer)
            if self.stopped.wait(pause):
                raise CollectiveError("replicas: this process has left")
            pause = min(2 * pause, 0.02)
        return found

    def _must_decide(self, last: Round, here: Sequence[str], waited_s: float) -> bool:
        if len(here) < self._min_replicas:
            return False
        missing = [name for name in last.names if name not in here]
        if len(missing) == len(last.names):  # the previous members may be in a long step
            return waited_s > self._patience_s and all(map(self._is_dead, missing))
        dead = [self._is_dead(name) for name in missing]
        return all(dead) or (self._name in last.names and waited_s > self._timeout_s)

    def _is_dead(self, name: str) -> bool:
        beats = self.store.multi_get([f"beat/{name}/{rank}" for rank in range(self._num_ranks)])
        before, since = self._beats.get(name, (None, 0.0))
        if beats != before and (before is None or all(a != b for a, b in zip(before, beats, strict=True))):
            self._beats[name] = beats, time.monotonic()
            return b"left" in beats
        return b"left" in beats or time.monotonic() - since > self._patience_s

    def _proposal(self, last: Round, here: Sequence[Member]) -> Round:
        by_name = {member.name: member for member in here}
        names = [name for name in last.names if name in by_name]
        members = tuple(by_name[name] for name in dict.fromkeys([*names, *by_name]))
        keeps = [member.name for member in members] == last.names and all(member.is_well for member in members)
        return Round(last.number + 1, members, last.made if keeps else last.number + 1, self._name)
