"""Examples on two and four ranks that share a GPU over NCCL."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, TEXT, TINY, TINY_STEPS, environment, metrics, run, shards
from tests.helpers.scripts import Finished, run_script
from tests.helpers.source_tree import ROOT

pytestmark = pytest.mark.gpu


def on_gpu(script: str, *arguments: str | Path, ranks: int = 2) -> Finished:
    words = ("tests.gpu.script", EXAMPLES / script, *arguments)
    job = run_script("-m", *words, ranks=ranks, cwd=ROOT, environment=environment())
    assert job.status == 0, job.output + job.errors[-3000:]
    return job


def test_train_lm(tmp_path: Path) -> None:
    """From its start to a resumed run: the losses of the CPU, and the same bits when it goes on from the middle."""
    whole, host = tmp_path / "whole", tmp_path / "host"
    on_gpu("train_lm/train_lm.py", *TINY, *TEXT, "--out", whole)
    assert run("train_lm/train_lm.py", "--device", "cpu", *TINY, *TEXT, "--out", host).status == 0
    assert metrics(whole, "loss") == pytest.approx(metrics(host, "loss"), abs=1e-2)
    final = shards(whole, TINY_STEPS)
    shutil.rmtree(whole / f"checkpoints/step-{TINY_STEPS:08d}")
    assert "going on from" in on_gpu("train_lm/train_lm.py", *TINY, *TEXT, "--out", whole, "--resume").output
    assert shards(whole, TINY_STEPS) == final


@pytest.mark.parametrize("script", ["minimal.py", "pipeline.py"])
def test_it_learns(script: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", on_gpu(script).output)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "degrees", ["replicate=2 tensor=2", "pipeline=2 context=2 activation_checkpointing=full", "shard=2 context=2"]
)
def test_parallel(degrees: str) -> None:
    """The losses are those of one process, whatever the degrees."""
    alone, shared = (
        [
            float(loss)
            for loss in re.findall(r"epoch \d+  loss (\S+)", on_gpu("parallel.py", *words, ranks=ranks).output)
        ]
        for words, ranks in (((), 1), (degrees.split(), 4))
    )
    assert len(alone) == 4 and shared == pytest.approx(alone, rel=1e-2)
