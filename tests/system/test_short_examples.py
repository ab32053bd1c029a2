"""vision.py, diffusion.py and moe.py as a user starts them: they learn, on any number of ranks, and resume exactly."""

import re
from pathlib import Path

import pytest

from tests.helpers.examples import run
from tests.helpers.scripts import Finished

STEPS = 20
SMALL = {"vision.py": 32, "diffusion.py": 16, "moe.py": 64}  # examples a step


def losses(job: Finished) -> dict[int, float]:
    """The held-out loss by step."""
    assert job.status == 0, job.errors
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+) .*?loss (\S+)", job.output, re.M)}


def start(script: str, folder: Path, *arguments: str, steps: int = STEPS, ranks: int | None = 2) -> Finished:
    words = ["--device", "cpu", "--out", str(folder), "--batch-size", str(SMALL[script]), "--steps", str(steps)]
    return run(script, *words, *arguments, ranks=ranks)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "vision.py" else [pytest.mark.exhaustive]) for name in SMALL],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    """A program, and what two ranks printed."""
    script: str = request.param
    return script, start(script, tmp_path_factory.mktemp("whole"))


def test_the_loss_falls(whole: tuple[str, Finished]) -> None:
    of = losses(whole[1])
    assert list(of) == [0, STEPS]
    assert of[STEPS] < 0.75 * of[0]


@pytest.mark.exhaustive
def test_one_process_trains_the_same_model(whole: tuple[str, Finished], tmp_path: Path) -> None:
    assert losses(start(whole[0], tmp_path, ranks=None)) == pytest.approx(losses(whole[1]), rel=1e-2)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_as_an_uninterrupted_one(whole: tuple[str, Finished], tmp_path: Path) -> None:
    script, uninterrupted = whole
    start(script, tmp_path, steps=STEPS // 2)
    job = start(script, tmp_path, "--resume")
    assert list(losses(job)) == [STEPS // 2, STEPS]
    end = f"step {STEPS:>4}"  # from here on all is the same: the loss, and the images that the diffusion model draws
    assert job.output.partition(end)[2] == uninterrupted.output.partition(end)[2] != ""


@pytest.mark.exhaustive
def test_experts_without_tokens(tmp_path: Path) -> None:
    """With one sequence a rank, some experts get no token there. All ranks go on, to what one process computes: if
    the auxiliary loss were of each rank's own tokens, the loss would be off by 0.002."""
    shared, alone = (start("moe.py", tmp_path, "--batch-size", "2", steps=10, ranks=ranks) for ranks in (2, None))
    assert losses(shared) == pytest.approx(losses(alone), abs=5e-4)
