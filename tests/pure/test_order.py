"""The order of units, without tensors or groups: backward prefetches the unit that ran before, for every sequence of
calls of three units (Behaviour 49, 56, 66, 67)."""

import itertools

import pytest

from fsdp2.runtime.step import Pass


@pytest.mark.parametrize("length", range(1, 5))
def test_backward_prefetches_the_reverse_of_what_ran(length: int) -> None:
    for order in itertools.product("abc", repeat=length):
        current = Pass()
        positions = [current.record(unit) for unit in order]
        for position in positions:
            before = [unit for unit in order[:position] if unit != order[position]]
            assert current.before(position) == (before[-1] if before else None)


def test_two_forwards_then_their_backwards_in_any_order() -> None:
    """Behaviour 57: each backward follows its own forward."""
    passes = [Pass(), Pass()]
    for current, order in zip(passes, ("abc", "bca"), strict=True):
        for unit in order:
            current.record(unit)
    for first, second in ((0, 1), (1, 0)):
        for index in (first, second):
            targets = [passes[index].before(position) for position in (2, 1, 0)]
            assert targets == [["b", "a", None], ["c", "b", None]][index]
