"""A training script written for torch's FSDP2, run as it is: on torch's, and on fsdp2 in the ways of `fsdp2.compat`.

They differ in how a process is started, which test_compat.py shows in short; one script does all that a client does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

pytestmark = pytest.mark.exhaustive  # a torchrun of two ranks takes seconds

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
    model, optimizer = build(mesh=mesh, mp_policy=bf16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    result["with options"] = train(model, optimizer, range(3))
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
ON = {"PYTHONPATH": str(ROOT / "fsdp2" / "compat" / "bootstrap"), "FSDP2_COMPAT": "1"}
# How to start it: the words before the script and its arguments, and the environment.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "launcher": (["-m", "fsdp2.compat", *TORCHRUN], {}),
    "environment": (["examples/launch.py", *TORCHRUN[2:]], ON),
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def words(folder: Path) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    return [str(folder / each) for each in ("train.py", "results.json", "checkpoint")]


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds on torch's FSDP2."""
    folder = tmp_path_factory.mktemp("torch")
    job = run_script(*words(folder), ranks=2, cwd=ROOT, environment=ENVIRONMENT, timeout_s=TIMEOUT_SECONDS)
    assert job.status == 0, job.errors
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert found.pop("module") == "torch.distributed.fsdp"
    return found


@pytest.mark.parametrize("way", WAYS)
def test_same_on_fsdp2(torchs: dict[str, Any], way: str, tmp_path: Path) -> None:
    """Losses and gradient norms to the last bit, also after a checkpoint of `torch.distributed.checkpoint`."""
    before, variables = WAYS[way]
    command = [sys.executable, *before, *words(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found.pop("module") == "fsdp2.module"
    assert found == torchs
    assert found["same"] and found["checks"] == [True, True] and found["name"] == "__main__"
    assert found["resumed"] == found["went on"]
