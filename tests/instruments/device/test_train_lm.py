"""`examples/train_lm/train_lm.py` on the lagging device, from its start to a resumed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, TEXT, TINY, TINY_STEPS, environment, metrics, run, shards
from tests.helpers.scripts import Finished, run_script
from tests.helpers.source_tree import ROOT
from tests.instruments.device import lagging


def on_device(seed: int, *arguments: str | Path) -> Finished:
    words = ("tests.instruments.device.script", str(seed), EXAMPLES / "train_lm/train_lm.py", *TINY, *TEXT, *arguments)
    return run_script("-m", *words, ranks=2, cwd=ROOT, environment=environment())


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(lagging.compiler() is None, reason="the lagging device needs a C++ compiler and Python's headers")
def test_from_start_to_resume(tmp_path: Path) -> None:
    """The same losses as on the CPU, up to the attention kernel's rounding; and the same bits under other delays, and
    in a run that goes on from the middle, in which each save was staged in the background."""
    lagging.library()
    whole, other, host = (tmp_path / name for name in ("whole", "other", "host"))
    for job in (
        on_device(1, "--out", whole),
        on_device(2, "--out", other),
        run("train_lm/train_lm.py", "--device", "cpu", *TINY, *TEXT, "--out", host),
    ):
        assert job.status == 0, job.errors[-3000:]
    assert metrics(whole, "loss") == pytest.approx(metrics(host, "loss"), abs=1e-3)
    final = shards(whole, TINY_STEPS)
    assert final == shards(other, TINY_STEPS)
    shutil.rmtree(other / f"checkpoints/step-{TINY_STEPS:08d}")
    job = on_device(3, "--out", other, "--resume")
    assert job.status == 0 and "going on from" in job.output, job.output + job.errors[-3000:]
    assert shards(other, TINY_STEPS) == final
