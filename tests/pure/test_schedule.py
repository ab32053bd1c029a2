"""The schedule, without tensors, streams or groups: for every sequence of calls of three units, backward prefetches
the unit that ran before, and only within its own forward (Behaviour 49, 56, 57, 60, 66-68)."""

import itertools

import pytest

from fsdp2.runtime.schedule import Schedule


@pytest.mark.parametrize("length", range(1, 5))
def test_backward_prefetches_the_reverse_of_what_ran(length: int) -> None:
    for order in itertools.product("abc", repeat=length):
        schedule: Schedule[str] = Schedule()
        schedule.begin_forward()
        hooks = [schedule.finished(unit) for unit in order]
        schedule.end_forward()
        for position, hook in enumerate(hooks):
            before = [unit for unit in order[:position] if unit != order[position]]
            assert list(schedule.backward_targets((), *hook)) == before[-1:]


def test_two_forwards_then_their_backwards_in_any_order() -> None:
    """Behaviour 57: each backward follows its own forward."""
    schedule: Schedule[str] = Schedule()
    passes = []
    for order in ("abc", "bca"):
        schedule.begin_forward()
        passes.append([schedule.finished(unit) for unit in order])
        schedule.end_forward()
    for first, second in ((0, 1), (1, 0)):
        for index in (first, second):
            targets = [list(schedule.backward_targets((), *hook)) for hook in reversed(passes[index])]
            assert targets == [[["b"], ["a"], []], [["c"], ["b"], []]][index]


def test_a_forward_outside_of_the_roots_prefetches_nothing() -> None:
    """Behaviour 42: neither a unit called alone nor the recomputation of a checkpoint belongs to the order."""
    schedule: Schedule[str] = Schedule()
    schedule.begin_forward()
    schedule.finished("a")
    schedule.end_forward()
    assert not schedule.in_root_forward
    hook = schedule.finished("b")
    assert list(schedule.backward_targets((), *hook)) == []


def test_an_explicit_list_replaces_the_implicit_target() -> None:
    """Behaviour 68: and an empty list restores it."""
    schedule: Schedule[str] = Schedule()
    schedule.begin_forward()
    schedule.finished("a")
    hook = schedule.finished("b")
    assert list(schedule.backward_targets(["c", "a"], *hook)) == ["c", "a"]
    assert list(schedule.backward_targets([], *hook)) == ["a"]
