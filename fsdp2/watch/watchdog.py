"""The watchdog: a thread that reports what this process does when another rank asks, and ends waits that would hang.
Layer: watch.

::

    a rank waits too long     ask/7                                           (the question with number 7)
    every watchdog            answer/7/RANK    its trails, its wait, its stack
    the first to claim it     collector/7      compares the answers (`collecting`)
                              verdict/7        every watchdog reads it; a fault ends the waits of its process

It sleeps, and checks twice a second whether its process waits for too long or another rank has asked. It has its own
client of the store, and never uses a collective.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from weakref import ref

import torch
import torch.distributed as dist

from fsdp2._torch.watch import abort, all_groups
from fsdp2.watch.board import Board, open_board
from fsdp2.watch.collecting import await_verdict, collect, identity
from fsdp2.watch.current import current
from fsdp2.watch.examine import Answer, Finding, Past, Wait
from fsdp2.watch.settings import settings
from fsdp2.watch.trail import Trail, entry_of, forget_other_groups, trails

_TICK_S = 0.5
_FAST_S = 0.01  # after a rank has failed in a joint step
_AGAIN_S = 3.0  # between two questions about one wait
_MAX_SENT = 2000  # entries of a trail
_END_WAITS_TAG = 0x46530005
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

_log = logging.getLogger("fsdp2")


class Watchdog:
    """The watchdog of one process and one default process group.

    Attributes:
        board: for the training thread.
        agreed: for each group, the number of entries that are known to be the same on all its ranks.
        num_rounds: the number of its last question that got a verdict.
    """

    def __init__(self, world: dist.ProcessGroup, board: Board):
        self.board = board.clone()
        self.agreed: dict[str, int] = {}
        self.num_rounds = 0
        self.later: deque[tuple[str, int, int]] = deque()
        self._world = ref(world)
        self._board = board
        self._wanted = False
        self._num_begun = 0  # rounds
        self._wake = threading.Event()
        self._stop = False
        self._pid = os.getpid()
        self._next_ask = 0.0
        self._before: Finding | None = None
        self._reported = 0.0  # the wait that was last reported as late
        current.failure = None  # an earlier one was of other groups
        forget_other_groups(all_groups())
        board.put(f"hello/{board.rank}", identity())
        self._thread = threading.Thread(target=self._run, name="fsdp2-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def failure(self) -> str | None:
        """The report, once a fault was found."""
        return current.failure

    @property
    def last_finding(self) -> str:
        """The text of the last finding; empty if there is none."""
        return "" if self._before is None else self._before.text

    @property
    def is_alive(self) -> bool:
        """Whether it still watches the current process group."""
        world = self._world()  # None if it was destroyed, and nothing else holds it
        return not self._stop and self._pid == os.getpid() and world is not None and world is dist.group.WORLD

    def ask(self) -> None:
        """Ask all ranks now, and again if no rank compares the answers. `num_rounds` grows when they have answered."""
        self._wanted = True
        self._wake.set()

    def explain(self) -> str | None:
        """The ranks' report after a communication error, or None if they know nothing. `current` must still
        say what failed."""
        before = self._num_begun  # a running round may have been answered before the error
        deadline = time.monotonic() + 2 * settings().answer_within_s + 2
        self.ask()
        while self.failure is None and self.num_rounds <= before and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def close(self, why: str = "") -> None:
        """The process is ending: report it to the other ranks, and end the thread. (Python would crash if it ended the
        thread within a call of the store.)"""
        if self._pid != os.getpid():  # a forked child has the same connections
            return
        has_ended, self._stop = self._stop, True
        self._board.is_closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)  # it may be about to report this itself
            if self._thread.is_alive():  # it is in a call of the store, with the only client
                return
        if not has_ended:
            with suppress(RuntimeError):
                content = [why or _why_it_ends(), self._answer().to_json()]
                self._board.put(f"ended/{self._board.rank}", json.dumps(content))
        atexit.unregister(self.close)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 1
        try:
            while self._sleep():
                if not settings().is_on:
                    continue
                self._compare_later()
                step = current.step  # the training thread may end it at any time
                if step is not None and (why := step.check_others(self._board)) is not None:
                    self.fail(why)
                if self._must_ask():
                    self._board.put(f"ask/{number}", str(self._board.rank))
                elif not self._board.has(f"ask/{number}"):
                    continue
                was_wanted, self._wanted = self._wanted, False
                self._num_begun += 1
                finding = self._round(number)
                number += 1
                if finding is not None:
                    self._act(finding)
                elif was_wanted:
                    self.ask()  # the collector has ended; another rank will collect
            self.close("has destroyed its process groups")
        except Exception as error:
            # After a RuntimeError the store is gone together with its process, and waits get the backend's error.
            # A new watchdog would be useless, because those of the other ranks continue.
            _unwatched[:] = [self._world]
            self._stop = True
            level = logging.DEBUG if isinstance(error, RuntimeError) else logging.ERROR
            _log.log(level, "the watchdog ends: %s: %s", type(error).__name__, error)

    def _sleep(self) -> bool:
        """Sleep. Returns whether to continue."""
        step = current.step
        self._wake.wait(_TICK_S if step is None or step.failure is None else _FAST_S)
        self._wake.clear()
        return self.is_alive

    def _must_ask(self) -> bool:
        if self._wanted:
            return True
        wait = current.oldest(settings().stall_after_s)
        return wait is not None and time.monotonic() >= self._next_ask

    def _compare_later(self) -> None:
        """Compare what this rank has recorded with the records of other ranks at the same places, without waiting."""
        while self.later:
            name, position, total = self.later.popleft()
            if self._board.claim(f"later/{name}/{position}", str(total)) != str(total):
                self._wanted = True

    def _round(self, number: int) -> Finding | None:
        """Answer a question, and get or make the verdict; None if no rank makes it."""
        board = self._board
        board.put(f"answer/{number}/{board.rank}", json.dumps(self._answer().to_json()))
        if (collector := int(board.claim(f"collector/{number}", str(board.rank)))) == board.rank:
            return collect(board, number, self._before)
        return await_verdict(board, number, collector)

    def _answer(self) -> Answer:
        pasts = {trail.name: _past(trail) for _, trail in trails()}
        oldest, wait = current.oldest(), None
        if oldest is not None:
            awaited = oldest.awaited
            wait = Wait(awaited.group_name, awaited.what, awaited.fqn, current.has_failed, oldest.place)
        return Answer(self._board.rank, pasts, wait, _line_of_main())

    def _act(self, finding: Finding) -> None:
        """Act on the verdict."""
        self.agreed.update(finding.agreed)
        self._before = finding
        wait = current.oldest()
        self._next_ask = time.monotonic() + (1.0 if finding.kind == "unclear" else _AGAIN_S)
        if finding.is_fault:
            self.fail(finding.text)
        elif finding.kind == "late" and wait is not None and self._reported != wait.since:
            waited = time.monotonic() - wait.since
            if waited >= settings().stall_after_s:
                self._reported = wait.since
                _log.warning("waiting for other ranks since %.0f s: %s", waited, finding.text)
        self.num_rounds = self._num_begun

    def fail(self, why: str) -> None:
        """End all waits of this process with this error."""
        if current.failure is None and self.is_alive:  # else new groups may exist; these must not end
            groups = [group for group in all_groups() if group.size() > 1]
            backends = [dist.get_backend_config(group) for group in groups]
            current.failure = why  # from now on the program may destroy them
            if not _end_waits(groups, backends):
                _log.error("%s", why)  # the wait may never end, and then nothing is raised


_running: list[Watchdog] = []
_unwatched: list[ref[dist.ProcessGroup]] = []  # the default process group, if its ranks cannot answer


def watchdog() -> Watchdog | None:
    """The watchdog of the current default process group, started at the first call; None if it cannot have one."""
    if _running and _running[0].is_alive:
        return _running[0]
    if not settings().is_on or not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if world is None or (_unwatched and _unwatched[0]() is world):
        return None
    _running.clear()
    board = open_board()
    if board is None:
        _unwatched[:] = [ref(world)]
        return None
    _running.append(Watchdog(world, board))
    Finalize(None, _close_running, exitpriority=0)  # before a process of multiprocessing handles its exception
    return _running[0]


def _close_running() -> None:
    for dog in _running:
        dog.close()


def _past(trail: Trail) -> Past:
    position, numbers = trail.end(_MAX_SENT)
    return Past(trail.ranks, position - len(numbers), tuple(map(entry_of, numbers)))


def _line_of_main() -> str:
    """The innermost line of the main thread outside of libraries."""
    frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    files = [each for each in frames if not each.filename.startswith("<")]  # a dataclass' __init__ has no file
    own = [each for each in files if not each.filename.startswith(_PACKAGE) and "/lib/python3" not in each.filename]
    at = (own or frames)[-1]
    return f"{at.filename}:{at.lineno} ({at.name})"


def _why_it_ends() -> str:
    error = sys.exception()
    if isinstance(error, SystemExit):
        error = error.__context__  # torch.multiprocessing.spawn exits after an exception
    error = error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "has ended" if error is None else f"has ended after {type(error).__name__}: {error}"


def _end_waits(groups: Sequence[dist.ProcessGroup], backends: Sequence[str]) -> bool:
    """End every wait in `groups`, each with its backends, which makes them unusable. Returns whether that is certain.

    gloo cannot abort, but a message that times out closes the connections of its group, which ends all its waits."""
    others = []
    for group, names in zip(groups, backends, strict=True):
        if "gloo" in names:
            # Try every peer: one that has closed its connections fails at once, which does not end waits for others.
            for peer in set(range(group.size())) - {group.rank()}:
                with suppress(RuntimeError):
                    group.recv([torch.zeros(1)], peer, _END_WAITS_TAG).wait(timedelta(milliseconds=1))
        if any(not part.endswith("gloo") for part in names.split(",")):
            others.append(group)
    if others:
        with suppress(RuntimeError):
            abort(others)
    return not others
