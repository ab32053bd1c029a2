"""The order of units, without tensors or groups: backward prefetches the unit that ran before, for every sequence of
calls of three units (Behaviour 49, 56, 66, 67)."""

import itertools

import pytest

from fsdp2.runtime.step import Pass


@pytest.mark.parametrize("length", range(1, 5))
def test_backward_prefetches_the_reverse_of_what_ran(length: int) -> None:
    for order in itertools.product("abc", repeat=length):
        current = Pass()
        for position, unit in enumerate(order):
            before = [other for other in order[:position] if other != unit]
            assert current.record(unit) == (before[-1] if before else None)
