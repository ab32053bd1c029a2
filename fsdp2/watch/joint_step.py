"""`JointStep`: a step that all ranks complete, or none. Layer: watch.

A rank that has failed must not just stop: others wait for its messages, and backends cannot cancel messages. So it
takes part in what others have begun, with scratch memory, until all have stopped at the same place::

    rank 0   gather a   gather b   gather c           waits for gather c; learns that rank 1 failed: stops
    rank 1   gather a   gather b   failed             takes part in gather c: all are equally far

No rank is interrupted. Every rank learns of the failure from its watchdog, and pauses before its next exchange. Paused
ranks continue up to the farthest one before they stop, because they may have communication between two exchanges that
fsdp2 does not know, such as that of tensor parallelism. Afterwards process groups are usable, on any backend.

The keys, below ``joint/7`` for the seventh step::

    through      how many ranks have completed it; the last one sets `all`, and all leave
    failed       the message of the first rank that failed
    place/RANK   how far a rank has come since
    given up     why the ranks cannot stop at the same place
    reset        how many ranks have discarded the step; the last one sets `all reset`, and all leave
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from fsdp2.errors import CollectiveError, StepError
from fsdp2.watch.board import Board
from fsdp2.watch.current import waiting
from fsdp2.watch.trail import Entry, Trail, entry_of, number_of, trail_of, trails
from fsdp2.watch.watchdog import Watchdog

_MAX_PUBLISHED = 4096  # the most entries that a rank may be behind; on a device others run ahead for half a second
_MAX_TEXT = 10_000  # characters of an error
_LIMIT_S = 60.0
_END = Entry("end of a joint step", None)


class _Place(NamedTuple):
    """How far a rank has come.

    Attributes:
        status: "runs", "pauses" before an exchange, "stopped".
        num_exchanges: exchanges of this step that it has begun.
        ends: group name -> (the number of entries, the last entries).
    """

    status: str
    num_exchanges: int
    ends: dict[str, tuple[int, list[int]]]


class JointStep:
    """One step. Every rank of the default process group creates it, and ends it with `succeed` or `stop`.

    Attributes:
        failure: the message of a rank that failed; None while no failure is known.
        what, fqn, group_name: see `fsdp2.watch.current.Awaited`.
    """

    def __init__(self, dog: Watchdog):
        world = dist.group.WORLD
        assert world is not None
        dog.board.num_joint_steps += 1
        number = dog.board.num_joint_steps
        self.failure: str | None = None
        self.what = _END.operation
        self.fqn: str | None = None
        self._trail = trail_of(world)
        self.group_name = self._trail.name
        self._dog = dog
        self._before = f"joint/{number - 1}"
        self._key = f"joint/{number}"
        self._state = "runs", 0  # status and number of exchanges, in one object: see `_publish`

    # --- in the watchdog's thread -------------------------------------------------------------------------------------

    def check_others(self, board: Board) -> str | None:
        """Check whether a rank has failed; if so, publish how far this one is. Returns why recovery was given up."""
        if self.failure is None:
            found = board.get(f"{self._key}/failed")
            if found is None:  # do not assign None: this rank may have set `failure` itself meanwhile
                return None
            self.failure = found
        self._publish(board)
        return board.get(f"{self._key}/given up")

    # --- in the training thread ---------------------------------------------------------------------------------------

    def begin_exchange(self) -> None:
        """Before each exchange; see `check`."""
        self.check()
        status, num_exchanges = self._state
        self._state = status, num_exchanges + 1

    def check(self) -> None:
        """Raise `StepError` if another rank has failed, and all that have not failed are as far as this one."""
        status, num_exchanges = self._state
        if self.failure is not None and status != "stopped":
            self._state = "pauses", num_exchanges
            if self._wait(self._must_stop):
                raise StepError(self.failure)
            self._state = "runs", num_exchanges

    def succeed(self) -> bool:
        """This rank has completed the step. Returns whether all have; otherwise a rank has failed.

        Raises:
            CollectiveError: a rank has died, or did something else.
        """
        board = self._dog.board
        self._trail.note(_END)
        if board.count(f"{self._key}/through") == board.size:
            board.put(f"{self._key}/all", "1")
            board.drop([f"{self._before}/{part}" for part in ("through", "all", "reset", "all reset", "failed")])
            return True
        return self._wait(lambda: board.has(f"{self._key}/all") or (None if self.failure is None else False), False)

    def stop(self, why: str, reset: Callable[[], None]) -> str:
        """This rank has failed, or knows that another one has. Returns the message of the first one that failed.

        Args:
            reset: discards the step; it may wait for what this rank has begun.

        Raises:
            CollectiveError: the ranks cannot stop at the same place.
        """
        board, begun = self._dog.board, list[Callable[[], None]]()
        self._state = "stopped", self._state[1]
        self.failure = board.claim(f"{self._key}/failed", why[:_MAX_TEXT])
        try:
            self._wait(lambda: self._is_level(begun) or None)
            reset()
            for finish in begun:
                finish()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            found = str(error) if isinstance(error, CollectiveError) else f"{type(error).__name__}: {error}"
            raise self._give_up(f"after a failed step ({self.failure}): {found}") from error
        for _, trail in trails():
            trail.reset()
        if board.count(f"{self._key}/reset") == board.size:
            board.put(f"{self._key}/all reset", "1")
            # This step's own "failed" must stay, because a watchdog may still read it.
            board.drop([f"{self._before}/failed", *(f"{self._key}/place/{rank}" for rank in range(board.size))])
        self._wait(lambda: board.has(f"{self._key}/all reset") or None)
        return self.failure

    def _must_stop(self) -> bool | None:
        """Whether all ranks that have not failed pause here (True), or one is farther (False)."""
        self._publish(self._dog.board)
        others = [place for place in self._places() if place is None or place.status != "stopped"]
        _, num_exchanges = self._state
        if any(place is not None and place.num_exchanges > num_exchanges for place in others):
            return False
        return all(place is not None and place[:2] == ("pauses", num_exchanges) for place in others) or None

    def _is_level(self, begun: list[Callable[[], None]]) -> bool:
        """Take part in what others have begun so far. Returns whether all have stopped at the same place."""
        self._publish(self._dog.board)
        places = self._places()
        is_level = all(place is not None and place.status == "stopped" for place in places)
        for _, trail in trails():
            ends = [place.ends[trail.name] for place in places if place is not None and trail.name in place.ends]
            is_level = is_level and all(end == trail.position for end, _ in ends)
            for number in _missing(trail, ends):
                begun += _take_part(trail, number)
        return is_level

    def _publish(self, board: Board) -> None:
        # Read the state first. In the watchdog's thread it may be older than the trails, which is harmless; "stopped"
        # with older trails would mislead the other ranks.
        status, num_exchanges = self._state
        ends = {trail.name: trail.end(_MAX_PUBLISHED) for _, trail in trails()}
        board.put(f"{self._key}/place/{board.rank}", json.dumps(_Place(status, num_exchanges, ends)))

    def _places(self) -> list[_Place | None]:
        board = self._dog.board
        found = [board.get(f"{self._key}/place/{rank}") for rank in range(board.size)]
        return [None if text is None else _Place(*json.loads(text)) for text in found]

    def _wait(self, answer: Callable[[], bool | None], is_limited: bool = True) -> bool:
        """The first answer that is not None."""
        pause, start = 0.0001, time.monotonic()
        with waiting(self):
            while (found := answer()) is None:
                if self._dog.failure is not None:
                    raise CollectiveError(self._dog.failure)
                if (given_up := self._dog.board.get(f"{self._key}/given up")) is not None:
                    raise self._give_up(given_up)
                if is_limited and time.monotonic() - start > _LIMIT_S:
                    why = (
                        f"after a failed step ({self.failure}), the ranks did not stop at the same place within "
                        f"{_LIMIT_S:g} s: one is in communication outside of fsdp2"
                    )
                    raise self._give_up(why)
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
            return found

    def _give_up(self, why: str) -> CollectiveError:
        """The error that all ranks raise, now and at every later exchange."""
        with suppress(RuntimeError):  # the store is gone, which the others notice too
            why = self._dog.board.claim(f"{self._key}/given up", why)
        self._dog.fail(why)
        return CollectiveError(why)


def _missing(trail: Trail, ends: list[tuple[int, list[int]]]) -> list[int]:
    """The entries in the trail's group that another rank has made but this one has not."""
    end, numbers = max(ends, key=lambda place: place[0])
    missing = end - trail.position
    if missing > len(numbers):
        raise CollectiveError(f"this rank is {missing} exchanges behind in group '{trail.name}'")
    return numbers[len(numbers) - missing :]


def _take_part(trail: Trail, number: int) -> list[Callable[[], None]]:
    if number == number_of(_END):
        trail.note(_END)
        return []
    collective = trail.known.get(number)
    if collective is None:
        raise CollectiveError(
            f"another rank has begun {entry_of(number)} in group '{trail.name}', in which this rank cannot take part "
            "after an error, because it has never done it"
        )
    begun = collective.begin_like()
    trail.numbers.append(number)  # it may have raised
    return [begun]
