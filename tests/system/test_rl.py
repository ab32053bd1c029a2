"""examples/rl.py as a user starts it: two ranks train, a process samples with their weights, and the reward grows."""

import re
from pathlib import Path

import pytest

from tests.helpers.examples import run

pytest.importorskip("transformers", minversion="5.0")


@pytest.mark.parametrize("ranks", [2, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_the_reward_grows(ranks: int | None, tmp_path: Path) -> None:
    job = run("rl.py", "--steps", "20", "--figure", tmp_path / "reward.svg", ranks=ranks)
    assert job.status == 0, job.errors
    rewards = {int(step): float(reward) for step, reward in re.findall(r"step +(\d+) +reward (\S+)", job.output)}
    assert [*rewards] == [1, 10, 20] and (tmp_path / "reward.svg").exists()
    assert rewards[1] < 0.15 and rewards[20] > 3 * rewards[1]
