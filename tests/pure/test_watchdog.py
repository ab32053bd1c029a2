"""What a watchdog and a collector do with a question: a store, threads and real processes, but no rank that trains."""

import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from fsdp2.watch import collecting, current, processes, settings, trail, watchdog
from fsdp2.watch.board import Board
from fsdp2.watch.examine import Answer, Finding, Past, Wait
from fsdp2.watch.joint_step import JointStep
from fsdp2.watch.settings import Settings
from fsdp2.watch.trail import Entry, Trail, number_of
from fsdp2.watch.watchdog import Watchdog

A, B = (Entry("all-gather", unit, 16, 64, "torch.float32") for unit in "ab")
OFF = Settings(is_on=False, answer_within_s=0.3)  # the watchdog's own thread does nothing


class Group:
    """A process group of ranks that do not exist."""

    group_desc = "mesh"

    def __init__(self, name: str, ranks: tuple[int, ...]):
        self.group_name = name
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return 0


@dataclass
class Awaited:
    what: str = "all-gather"
    fqn: str | None = "a"
    group_name: str = "mesh:g"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("failure", None), ("awaited", None), ("since", 0.0)):
        monkeypatch.setattr(current.current, name, value)
    monkeypatch.setattr(settings, "_settings", [OFF])
    monkeypatch.setattr(watchdog, "_unwatched", [])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.fixture
def dog(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Rank 0's, of two."""
    world: Any = Group("world", (0, 1))
    monkeypatch.setattr(type(dist.group), "WORLD", world)
    found = Watchdog(world, Board(store, 0, 2))
    yield found
    found.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    found = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield found
    found.kill()
    found.communicate()


def identity_of(process: subprocess.Popen[bytes], machine: str | None = None) -> str:
    begun = processes.stat_of(process.pid)
    assert begun is not None
    return f"{machine or processes.machine()} {process.pid} {begun[1]}"


def stop(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process)
    process.send_signal(signal.SIGSTOP)
    while collecting.state_of(identity) != "T":
        time.sleep(0.01)


def put_answer(board: Board, number: int, answer: Answer) -> None:
    board.put(f"answer/{number}/{answer.rank}", json.dumps(answer.to_json()))


def waits(rank: int, ranks: tuple[int, ...] = (0, 1)) -> Answer:
    return Answer(rank, {"mesh:g": Past(ranks, 0, (A,))}, Wait("mesh:g", "all-gather", "a"))


# --- the collector ----------------------------------------------------------------------------------------------------


def test_the_line_of_a_rank_is_one_of_its_program(tmp_path: Path) -> None:
    """Not of a dataclass' __init__, which has no file, and also in a clone that is called fsdp2."""

    @dataclass
    class Config:
        line: str = field(default_factory=watchdog._line_of_main)

    assert Path(__file__).name in Config().line
    program = tmp_path / "fsdp2" / "train.py"
    program.parent.mkdir()
    program.write_text("from fsdp2.watch.watchdog import _line_of_main\nprint(_line_of_main())\n")
    assert subprocess.check_output([sys.executable, program], text=True) == f"{program}:2 (<module>)\n"


def test_a_stopped_process_is_told_from_a_killed_one(store: Any, process: subprocess.Popen[bytes]) -> None:
    boards = [Board(store, rank, 2) for rank in range(2)]
    boards[1].put("hello/1", identity_of(process))
    assert collecting.state_of(identity_of(process)) not in ("", "T", None)
    assert collecting.state_of(f"{processes.machine()} {process.pid} 1") == "", "another one with its number"
    stop(process)
    put_answer(boards[0], 1, waits(0))
    assert collecting.collect(boards[0], 1, None).text.startswith("rank 1 is stopped (SIGSTOP)")
    process.kill()
    process.communicate()
    put_answer(boards[0], 2, waits(0))
    assert collecting.collect(boards[0], 2, None).text.startswith("rank 1 was killed")


def test_a_machine_that_is_silent_as_a_whole(store: Any) -> None:
    """Nobody can say what has become of its ranks: they are given `answer_within_s`."""
    boards = [Board(store, rank, 2) for rank in range(2)]
    boards[1].put("hello/1", "elsewhere 1 1")
    put_answer(boards[0], 1, waits(0))
    finding = collecting.collect(boards[0], 1, None)
    assert finding.kind == "gone" and "rank 1 does not answer within 0.3 s" in finding.text


def test_nobody_waits_for_a_collector_that_is_dead(
    store: Any, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_settings", [replace(OFF, answer_within_s=60.0)])
    boards = [Board(store, rank, 2) for rank in range(2)]
    boards[0].put("hello/0", identity_of(process))
    process.kill()
    process.communicate()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(collecting.await_verdict, boards[1], 1, 0).result(timeout=30) is None


# --- the watchdog -----------------------------------------------------------------------------------------------------


def test_an_error_is_explained_although_the_collector_ends(
    dog: Watchdog, store: Any, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that ended had claimed the question, nobody asked another, and the error was that of gloo."""
    monkeypatch.setattr(settings, "_settings", [replace(OFF, is_on=True)])
    monkeypatch.setattr(watchdog, "_end_waits", lambda groups, backends: True)
    group: Any = Group("g", (0, 1))
    trail.trail_of(group).note(A)
    other = Board(store, 1, 2)
    other.put("hello/1", identity_of(process))
    other.put("ended/1", json.dumps(["has ended after ValueError: a bad batch", Answer(1).to_json()]))
    assert other.claim("collector/1", "1") == "1"
    process.kill()
    process.communicate()
    with current.waiting(Awaited(), has_failed=True):
        assert "rank 1 has ended after ValueError: a bad batch" in str(dog.explain())


class Gloo(Group):
    """Counts the peers whose waits are ended."""

    def __init__(self, name: str, ranks: tuple[int, ...]):
        super().__init__(name, ranks)
        self.peers: list[int] = []

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self.peers.append(peer)
        raise RuntimeError("Connection closed by peer")


def test_every_peer_is_told() -> None:
    """One that has closed its connections fails at once, which ends no wait for the others."""
    group: Any = Gloo("g", (0, 1, 2, 3))
    assert watchdog._end_waits([group], ["cpu:gloo"])
    assert sorted(group.peers) == [1, 2, 3]


def test_groups_may_be_destroyed_while_waits_end(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program, which has its error: torch knows no backend of them then, and the watchdog ended."""
    groups: Any = Gloo("g", (0, 1)), Gloo("h", (0, 1))
    monkeypatch.setattr(watchdog, "all_groups", lambda: list(groups))

    def backend_of(group: Any) -> str:
        if dog.failure is not None:
            raise TypeError("Invariant encountered: value was None when it should not be")
        return "cpu:gloo"

    monkeypatch.setattr(dist, "get_backend_config", backend_of)
    dog._act(Finding("gone", "rank 1 was killed"))
    assert [group.peers for group in groups] == [[1], [1]]


def test_a_trail_is_read_while_it_grows() -> None:
    """The training thread went on between two looks: all entries were one place too far, and a healthy job ended."""

    class Growing(list[int]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.append(number_of(B))
            return found

    grows = Trail(cast(Any, Group("g", (0, 1))))
    grows.numbers = Growing([number_of(A)] * 3)
    past = watchdog._past(grows)
    assert (past.first, past.entries) == (0, (A, A, A))
    assert grows.end(2)[0] == 4 and len(grows.numbers) == 5


def test_trails_are_listed_while_others_begin() -> None:
    """By the training thread. The watchdog ended with "dictionary changed size during iteration"."""
    groups: list[Any] = [Group(str(number), (0, 1)) for number in range(2000)]
    beginning = threading.Thread(target=lambda: [trail.trail_of(group) for group in groups])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        beginning.start()
        while beginning.is_alive():
            trail.trails()
        beginning.join()
    finally:
        sys.setswitchinterval(before)
    assert {group for group, _ in trail.trails()}.issuperset(groups)


def test_a_watchdog_that_has_ended_has_no_successor(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read and write other keys than those of other ranks: `agree_on_step` waited for ever."""

    def fails(*_: object) -> Any:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(settings, "_settings", [replace(OFF, is_on=True)])
    monkeypatch.setattr(dog._board, "has", fails)
    dog._wake.set()
    dog._thread.join(20)
    monkeypatch.setattr(watchdog, "_running", [dog])
    monkeypatch.setattr(watchdog, "open_board", fails)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert not dog.is_alive and watchdog.watchdog() is None


def test_a_rank_that_stops_is_not_told_at_its_old_place(dog: Watchdog, store: Any, monkeypatch: Any) -> None:
    """It stops while its watchdog tells how far it has come: the others saw it where they were, and went on."""
    step, mine = JointStep(dog), trail.trail_of(cast(Any, dist.group.WORLD))
    end = Trail.end

    def late(self: Trail, most: int) -> tuple[int, list[int]]:
        found = end(self, most)
        mine.note(A)
        step._state = "stopped", 0
        return found

    monkeypatch.setattr(Trail, "end", late)
    step._publish(Board(store, 0, 2))
    text = Board(store, 1, 2).get("joint/1/place/0")
    assert text is not None
    status, _, ends = json.loads(text)
    assert mine.position == 1 and ends[mine.name][0] == 0
    assert status == "runs"


@pytest.mark.parametrize(("theirs", "asks"), [("7", False), ("8", True)])
def test_what_is_compared_later(dog: Watchdog, store: Any, theirs: str, asks: bool) -> None:
    """Ranks that have done something else ask each other what it was."""
    Board(store, 1, 2).claim("later/mesh:g/3", theirs)
    dog.later.append(("mesh:g", 3, 7))
    dog._compare_later()
    assert dog._must_ask() is asks


def test_an_error_is_explained_by_answers_after_it(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question was under way when the other rank died, and had been answered: nothing was explained."""
    monkeypatch.setattr(settings, "_settings", [replace(OFF, is_on=True, answer_within_s=10.0)])
    begun, asked = threading.Event(), threading.Event()

    def take(number: int) -> Finding:
        begun.set()
        asked.wait(20)
        time.sleep(0.1)
        return Finding("fine") if number == 1 else Finding("gone", "rank 1 was killed")

    monkeypatch.setattr(dog, "_round", take)
    dog.ask()
    assert begun.wait(20)
    threading.Timer(0.1, asked.set).start()
    assert dog.explain() == "rank 1 was killed"


def test_a_process_waits_for_the_last_words_of_its_watchdog(
    dog: Watchdog, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has destroyed its process groups, and ends while the watchdog is about to say so: it seemed to be killed."""
    begun, answer = threading.Event(), dog._answer

    def late() -> Answer:
        begun.set()
        time.sleep(0.2)
        return answer()

    monkeypatch.setattr(dog, "_answer", late)
    monkeypatch.setattr(type(dist.group), "WORLD", None)
    dog._wake.set()
    assert begun.wait(20)
    dog.close()
    assert "has destroyed its process groups" in (Board(store, 1, 2).get("ended/0") or "")


def test_a_process_that_ends_does_not_wait_for_other_machines(
    dog: Watchdog, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog collects answers, and one may come within 60 s."""
    monkeypatch.setattr(settings, "_settings", [replace(OFF, is_on=True, answer_within_s=60.0)])
    other = Board(store, 1, 2)
    other.put("hello/1", "elsewhere 1 1")
    dog.ask()
    deadline = time.monotonic() + 20
    while not other.has("collector/1") and time.monotonic() < deadline:
        time.sleep(0.01)
    dog.close()
    assert not dog._thread.is_alive() and "has ended" in (other.get("ended/0") or "")


def test_a_process_under_a_debugger_is_not_gone(store: Any, process: subprocess.Popen[bytes]) -> None:
    """A tracer stops it (state t), as SIGSTOP does (T), but will let it go on."""
    ptrace, boards = ctypes.CDLL(None).ptrace, [Board(store, rank, 2) for rank in range(2)]
    boards[1].put("hello/1", identity_of(process))
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        assert ptrace(request, process.pid, None, None) == 0
    while collecting.state_of(identity_of(process)) != "t":
        time.sleep(0.01)
    put_answer(boards[0], 1, waits(0))
    assert collecting.collect(boards[0], 1, None).kind == "late"
