"""Start the examples as a user does, by torchrun or without it, and read what a run leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.scripts import Finished, run_script
from tests.helpers.source_tree import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_SECONDS = 120
TINY_STEPS = 6
TINY = (  # train_lm.py
    "--dim 32 --layers 2 --heads 2 --kv-heads 1 --hidden 64 --seq-len 32 --batch-size 4 --warmup 2 "
    f"--steps {TINY_STEPS} --save-every 3 --eval-batches 1 --sample-bytes 4 --log-every 1"
).split()
TEXT = ["--data", str(Path(json.__file__).parent)]  # the json package: some 40 kB in five files


def command(script: str, *arguments: str | Path, ranks: int = 2) -> list[str]:
    """The command line of a job."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)]


def environment() -> dict[str, str]:
    """Ours, with the package importable and one thread per rank; Rich's plain output at its usual width."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> Finished:
    """Wait for the job; one that hangs is killed with all its ranks, and fails the test."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its workers with it
        output, errors = process.communicate()
        pytest.fail(f"hung for {TIMEOUT_SECONDS} s\n{output}\n{errors}")
    return Finished(process.returncode, output, errors)


def torchrun(script: str, *arguments: str | Path, ranks: int = 2) -> Finished:
    return finish(start(command(script, *arguments, ranks=ranks)))


def run(script: str, *arguments: str | Path, ranks: int | None = 2) -> Finished:
    """The same without torchrun, in processes that have torch already; `ranks=None`: one that is no rank."""
    return run_script(EXAMPLES / script, *arguments, ranks=ranks, environment=environment())


def metrics(folder: Path, key: str) -> dict[int, float]:
    """The values of `key` in a run's metrics, by step."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[key] for record in records if key in record}


def shards(folder: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint, those of each rank: weights and optimizer state. (Not the random numbers, which the
    job does not seed.)"""
    return {
        f"{path.name}: {name}": tensor.numpy().tobytes()
        for path in (folder / f"checkpoints/step-{step:08d}").glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if not path.name.startswith("extra")
    }
