"""Waits that are taken out give wrong numbers on the lagging device."""

import pytest

from tests.helpers.mutants import Mutant
from tests.instruments.device import lagging
from tests.instruments.device.mutants import MUTANTS_HERE, found


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(lagging.compiler() is None, reason="the lagging device needs a C++ compiler and Python's headers")
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.campaign if index % 4 else [])
        for index, each in enumerate(MUTANTS_HERE)
    ],
)
def test_a_wait_that_is_taken_out_is_found(mutant: Mutant) -> None:
    assert found(mutant)
