"""Trails, and what those of all ranks say: no process group."""

import json
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp2.watch import trail as trail_module
from fsdp2.watch.current import Current, Waiting
from fsdp2.watch.examine import Answer, Finding, Past, Wait, examine
from fsdp2.watch.trail import Entry, Trail, number_of

A, B, C = (Entry("all-gather", unit, 16, 64, "torch.float32") for unit in "abc")
STEP = Entry("optimizer step", None)


@pytest.fixture
def trail(monkeypatch: pytest.MonkeyPatch) -> Trail:
    """Of two ranks that do not exist."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    return Trail(cast(Any, SimpleNamespace(group_name="0", group_desc="mesh")))


def answer(rank: int, *entries: Entry, wait: str = "", first: int = 0, ranks: tuple[int, ...] = (0, 1)) -> Answer:
    waits = Wait("g", wait, "a") if wait else None
    return Answer(rank, {"g": Past(ranks, first, entries)}, waits, "/run/train.py:7 (main)")


def found(*answers: Answer, gone: dict[int, str] | None = None, before: Finding | None = None) -> Finding:
    # As they arrive, through the store.
    through = [Answer.from_json(json.loads(json.dumps(each.to_json()))) for each in answers]
    assert through == list(answers)
    return examine({each.rank: each for each in through}, gone or {}, before)


def test_another_number_of_microbatches_is_new(trail: Trail) -> None:
    """Each backward of a step is a mark of its own: all of them are known, and yet a step with fewer is not."""

    def step(num_microbatches: int) -> list[bool]:
        news = []
        for _ in range(num_microbatches):
            trail.note(A)
            news.append(trail.mark(ends_step=False)[2])
        trail.note(STEP)
        return [*news, trail.mark(ends_step=True)[2]]

    assert step(3) == [True] * 4
    assert step(3) == [False] * 4
    assert step(2) == [False, False, True]


def test_a_trail_is_bounded(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a program without backwards."""
    monkeypatch.setattr(trail_module, "MAX_KEPT", 100)
    append = trail.numbers.append  # as exchanges hold it
    for _ in range(1000):
        append(number_of(A))
        trail.forget()
    assert len(trail.numbers) <= 101 and trail.position == 1000
    append(number_of(B))
    assert trail.mark(ends_step=True)[0] == 1001 and trail.numbers[-1] == number_of(B)


def test_the_oldest_wait_is_what_is_waited_for() -> None:
    """Of a stream or of the process; one that has failed comes first."""
    now, has_come = time.monotonic(), [False, False]
    streams = [Waiting(JustWaiting(str(number)), now - 3.0 + number, number) for number in range(2)]
    waits = Current()
    for number, wait in enumerate(streams):
        event = SimpleNamespace(query=lambda number=number: has_come[number])
        waits.queued._waits.append((cast(Any, event), wait))
    assert waits.oldest() == waits.oldest(2.5) == streams[0] and waits.oldest(3.5) is None
    waits.awaited, waits.since = JustWaiting("host"), now - 2.5
    assert waits.oldest() == streams[0]
    waits.has_failed = True
    assert waits.oldest() == (waits.awaited, now - 2.5, -1)
    waits.has_failed, has_come[0] = False, True
    assert waits.oldest() == (waits.awaited, now - 2.5, -1) and waits.oldest(2.7) is None
    waits.awaited = None
    assert waits.oldest() == streams[1] and len(waits.queued._waits) == 1
    has_come[1] = True
    assert waits.oldest() is None


def test_captured_waits_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured nothing waits, and a query would spoil the capture. (There is no CUDA here.)"""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    waits = Current().queued
    waits._waits.append((cast(Any, None), Waiting(JustWaiting("before"), 0.0, 0)))
    waits.add(JustWaiting("captured"), 1, torch.device("cuda"))
    assert waits.oldest(0.0) is None


@dataclass
class JustWaiting:
    what: str
    fqn: str | None = "a"
    group_name: str = "g"


GATHER = Wait("g", "all-gather", "a")
AHEAD = answer(0, A, B, A, wait="all-gather")  # in two more entries than rank 1 has done
WAITS_IN_G = Answer(0, {"g": Past((0, 1), 0, (A,)), "h": Past((0, 1), 0, ())}, GATHER)
WAITS_IN_H = Answer(1, {"g": Past((0, 1), 0, ()), "h": Past((0, 1), 0, (B,))}, Wait("h", "all-gather", "b"))
BEHIND_A_DEAD_ONE = Answer(1, {"g": Past((0, 1), 0, ()), "h": Past((1, 2), 0, (B,))}, Wait("h", "all-reduce", "b"))

# What is found when all are asked twice (one kind: both times), of these answers and these ranks that are gone.
FINDINGS: dict[str, tuple[str, list[Answer], dict[int, str]]] = {
    "what one rank no longer keeps is not compared": ("fine", [answer(0, A, B, C), answer(1, C, first=2)], {}),
    "what both keep is": ("differ", [answer(0, A, B, C), answer(1, B, first=2)], {}),
    "a rank that has done nothing yet": ("late", [answer(0, A, wait="all-gather"), Answer(1)], {}),
    "a busy machine gives no answer": ("late", [answer(0, A, wait="all-gather")], {}),
    # An idle rank may be behind, or may have ended when all was done.
    "nobody waits for one that is behind": ("fine", [answer(0, A, B), answer(1, A)], {}),
    "nobody waits for one that has ended": ("fine", [answer(0, A, B)], {1: "has ended"}),
    # Rank 0 has begun the next all-gather; both wait for the bytes of the first, on a slow network.
    "one is further": ("fine", [answer(0, A, B, wait="all-gather"), answer(1, A, wait="all-gather")], {}),
    # The last all-reduce of a job: rank 1 has sent its part and ended.
    "it ended after its part": ("fine", [answer(0, A, wait="all-gather"), answer(1, A)], {1: "has ended"}),
    "its message did not come after all": (
        "gone",
        [replace(answer(0, A), wait=replace(GATHER, has_failed=True)), answer(1, A)],
        {1: "has ended"},
    ),
    # A process whose waits do not block it has begun the same all-gather again. Rank 1 has made the first one: as far
    # as processes know; if it has ended, its device may not.
    "a process waits for its last entry": ("late", [AHEAD, answer(1, A)], {}),
    "a stream for its own": ("fine", [replace(AHEAD, wait=replace(GATHER, place=0)), answer(1, A)], {}),
    "a later one": ("late", [replace(AHEAD, wait=replace(GATHER, place=2)), answer(1, A)], {}),
    "of a rank that has ended": (
        "gone",
        [replace(AHEAD, wait=replace(GATHER, place=0)), answer(1, A)],
        {1: "has ended"},
    ),
    "what a dead rank waited for makes nobody late": (
        "fine",
        [answer(0), answer(1, A, wait="all-gather")],
        {1: "was killed"},
    ),
    "rank 0 waits for rank 1, which waits for a dead one": (
        "gone",
        [replace(WAITS_IN_G, pasts={"g": Past((0, 1), 0, (A,))}), BEHIND_A_DEAD_ONE],
        {2: "was killed"},
    ),
    "stages of a pipeline do different things in different groups": (
        "fine",
        [
            Answer(0, {"g": Past((0, 1), 0, (A,)), "h": Past((0, 2), 0, (B,))}),
            Answer(1, {"g": Past((0, 1), 0, (A, A))}),
            Answer(2, {"h": Past((0, 2), 0, (B,))}),
        ],
        {},
    ),
    # Two groups in another order: no trail differs, and each rank waits for the other. Seen once it is a moment.
    "a deadlock": ("unclear, deadlock", [WAITS_IN_G, WAITS_IN_H], {}),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_findings(name: str) -> None:
    kinds, answers, gone = FINDINGS[name]
    first = found(*answers, gone=gone)
    second = found(*answers, gone=gone, before=first)
    assert [first.kind, second.kind] == (kinds.split(", ") * 2)[:2]
    assert second.is_fault == (second.kind in ("differ", "gone", "deadlock"))
    if second.kind == "gone":
        assert second.text.startswith(f"rank {max(gone)} ")


def test_a_deadlock_is_none_if_something_moves() -> None:
    moved = replace(WAITS_IN_H, pasts={"g": Past((0, 1), 0, ()), "h": Past((0, 1), 0, (B, B))})
    assert found(WAITS_IN_G, moved, before=found(WAITS_IN_G, WAITS_IN_H)).kind == "unclear"


def test_a_group_agrees_on_what_all_its_ranks_have_answered() -> None:
    answers = [answer(rank, A, ranks=(0, 1, 2)) for rank in range(3)]
    assert found(*answers[:2]).agreed == {}
    assert found(*answers).agreed == {"g": 1}
