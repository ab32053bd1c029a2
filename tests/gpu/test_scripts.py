"""The scripts of benchmarks/gpu run: each of them here on the CPU, with tiny models. What they measure needs a GPU."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import delays, measure, sanitize, step
from benchmarks.gpu.variants import VARIANTS

FOLDER = Path(step.__file__).parent
DRY = ["--device", "cpu", "--size", "tiny"]


def commands_of_run() -> dict[str, list[str]]:
    """Name of each step of run.sh that is a script: its words."""
    text = (FOLDER / "run.sh").read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in re.findall(r"^ +bench (?!\()(.*)$", text, re.MULTILINE)]
    return {name: words for name, *words in lines}


def test_every_command_of_run_is_understood() -> None:
    parsers = {"step.py": step.parse, "delays.py": delays.parse, "sanitize.py": sanitize.parse}
    commands = commands_of_run()
    assert len(commands) == 7
    for script, *arguments in commands.values():
        options = parsers[script]([*arguments, *DRY])
        if script == "step.py":
            assert set(options.variants.split(",")) <= set(VARIANTS)
        else:
            assert set(options.settings.split(",")) <= set(delays.SETTINGS)
    subprocess.run(["bash", "-n", str(FOLDER / "run.sh")], check=True)


@pytest.mark.exhaustive
def test_variants_train_and_agree() -> None:
    """The sharded ones compute the same, bit for bit: torch's, and ours with any lanes."""
    losses = {}
    for name in ("none", "floor", "torch", "torch-lists", "fsdp2", "fsdp2-flat", "fsdp2-all", "fsdp2-auto"):
        result = step.run_one(step.parse([*DRY, "--group", "copy", "--steps", "1"]), name)
        losses[name] = result["losses"]
        assert len(result["step_s"]) == 1 and result["memory_bytes"] is result["timeline_s"] is result["mfu"] is None
    assert all(value == losses["torch"] for name, value in losses.items() if name not in ("none", "floor"))
    assert losses["none"] != losses["torch"]
    assert losses["none"] == pytest.approx(losses["torch"], rel=0.1)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_sanitizer(tmp_path: Path) -> None:
    """Behaviour 146: what is run where there is a GPU."""
    out = tmp_path / "sanitizer.json"
    sanitize.main([*DRY, "--settings", "lists", "--steps", "1", "--out", str(out)])
    assert json.loads(out.read_text())["complaints"] == {}


def test_timeline() -> None:
    """Two steps: kernels from 0 to 40 and from 60 to 100 us, a collective from 30 to 70, of which 20 are exposed; what
    is copied on its stream belongs to it."""
    compute, network = {"stream": 7}, {"stream": 20}
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 30, "args": compute},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 25, "dur": 15, "args": compute},
        {"cat": "kernel", "name": "gemm", "ts": 60, "dur": 40, "args": compute},
        {"cat": "kernel", "name": "spin_kernel(long)", "ts": 30, "dur": 10, "args": network},
        {"cat": "kernel", "name": "copy", "ts": 40, "dur": 30, "args": network},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
    ]
    found = measure.timeline(events, steps=2)
    assert found is not None and found.kernels == 1.5
    seconds = (found.compute, found.idle, found.communication, found.exposed)
    assert seconds == pytest.approx((40e-6, 10e-6, 20e-6, 10e-6))
    assert measure.timeline([], steps=2) is None
