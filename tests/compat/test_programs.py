"""A training script written for torch's FSDP2, run as it is: on torch's, and on fsdp2 in the ways of `fsdp2.compat`.

Every job on fsdp2 is a real torchrun of two ranks, which costs seconds; one script does all that a client of FSDP2
does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

pytestmark = pytest.mark.exhaustive

BOOTSTRAP = ROOT / "fsdp2" / "compat" / "bootstrap"
TIMEOUT_SECONDS = 170

SCRIPT = '''
"""Trains a small model with FSDP2, and writes what happened as JSON."""
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.fsdp import fully_shard as old_fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard, register_fsdp_forward_method,
    share_comm_ctx,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def score(self, x):
        return self(x).sum()


def build(**options):
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "score")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), norm.full_tensor().item()])
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    out, folder = sys.argv[1:]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    result = {"module": FSDPModule.__module__, "same": old_fully_shard is fully_shard, "name": __name__}
    for name, options in {"fp32": {}, "bf16": {"mp_policy": bf16}, "hsdp": {"mesh": mesh},
                          "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}.items():
        model, optimizer = build(**options)
        result[name] = train(model, optimizer, range(3))
    model, optimizer = build()
    train(model, optimizer, range(2))
    states = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=folder)
    other, its_optimizer = build()
    states = dict(zip(["model", "optimizer"], get_state_dict(other, its_optimizer)))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    result["resumed"] = train(other, its_optimizer, range(2, 4))
    result["went on"] = train(model, optimizer, range(2, 4))
    handle = model.blocks[0].unshard(async_op=True)
    result["checks"] = [isinstance(handle, UnshardHandle), all(isinstance(b, FSDPModule) for b in model.blocks)]
    handle.wait()
    model.reshard()
    share_comm_ctx([model])
    result["score"] = model.score(torch.ones(2, 16)).item()
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(result, file)
    dist.destroy_process_group()
'''

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# How to start it: the words before the script and its arguments, and the environment.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "module": ([*TORCHRUN, "-m", "fsdp2.compat"], {}),
    "launcher": (["-m", "fsdp2.compat", *TORCHRUN], {}),
    "environment": (["examples/launch.py", *TORCHRUN[2:]], {"PYTHONPATH": str(BOOTSTRAP), "FSDP2_COMPAT": "1"}),
}


class Results:
    """What the script found in each of the ways to start it; runs it when it is asked for the first time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.known: dict[str, dict[str, Any]] = {}

    def __getitem__(self, way: str) -> dict[str, Any]:
        if way not in self.known:
            out = self.folder / f"{way}.json"
            self._run(way, [str(self.script), str(out), str(self.folder / f"checkpoint of {way}")])
            self.known[way] = json.loads(out.read_text())
        return self.known[way]

    def _run(self, way: str, command: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if way == "torch":  # nothing is replaced, so it does not matter what is imported already
            job = run_script(*command, ranks=2, cwd=ROOT, environment=environment, timeout_s=TIMEOUT_SECONDS)
            assert job.status == 0, f"{way}:\n{job.errors}"
            return
        words, variables = WAYS[way]
        done = subprocess.run(
            [sys.executable, *words, *command],
            cwd=ROOT,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, f"{way}:\n{done.stderr}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("programs"))


# They differ in how a process is started, which test_compat.py shows in short.
OURS = ["environment", "module", "launcher"]


@pytest.mark.parametrize("way", OURS)
def test_runs_on_fsdp2(results: Results, way: str) -> None:
    """The names that the script imports are ours, by the new path and by the old one."""
    assert results[way]["module"] == "fsdp2.module"
    assert results[way]["same"] is True and results[way]["checks"] == [True, True]
    assert results[way]["name"] == "__main__"


def test_each_way_is_tested() -> None:
    assert set(OURS) == WAYS.keys()


def test_runs_on_torchs(results: Results) -> None:
    """Without any of it the same script runs on torch's FSDP2: the results that the others are compared with."""
    assert results["torch"]["module"] == "torch.distributed.fsdp"


@pytest.mark.parametrize("what", ["fp32", "bf16", "hsdp", "offload", "resumed", "score"])
@pytest.mark.parametrize("way", OURS)
def test_same_losses(results: Results, way: str, what: str) -> None:
    """Losses and gradient norms equal those on torch's FSDP2, to the last bit."""
    assert results[way][what] == results["torch"][what]


@pytest.mark.parametrize("way", ["torch", *OURS])
def test_resumes(results: Results, way: str) -> None:
    """A checkpoint by `torch.distributed.checkpoint` goes on as if nothing had happened."""
    assert results[way]["resumed"] == results[way]["went on"]
