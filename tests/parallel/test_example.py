"""`examples/parallel.py` as a user starts it: whatever the degrees, the losses are those of one process."""

import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.exhaustive


def losses(*arguments: str, ranks: int | None) -> list[float]:
    job = run("parallel.py", *arguments, ranks=ranks)
    assert job.status == 0, job.errors
    return [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", job.output)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(ranks=1)


def test_one_process_learns(alone: list[float]) -> None:
    assert len(alone) == 4 and alone[-1] < 0.8 * alone[0]


@pytest.mark.parametrize("keys", ["replicate=2 tensor=2", "pipeline=2 context=2 activation_checkpointing=full"])
def test_the_same_losses_on_four_ranks(keys: str, alone: list[float]) -> None:
    assert losses(*keys.split(), ranks=4) == pytest.approx(alone, rel=1e-2)
