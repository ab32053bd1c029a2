"""examples/unequal.py as a user starts it: both ways train on the same batches, and it says what each takes."""

import re

import pytest

from tests.helpers.examples import run


@pytest.mark.parametrize("ranks", [2, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_it_trains_and_says_what_is_saved(ranks: int | None) -> None:
    job = run("unequal.py", "--steps", "3", ranks=ranks)
    assert job.status == 0, job.errors
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", job.output)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert re.search(r"in order \S+ s a step, balanced \S+ s: -?\d+% of the time is saved", job.output)
