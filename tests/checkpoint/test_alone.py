"""`fsdp2.checkpoint` needs neither the runtime nor the optimizers of fsdp2."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

# `import fsdp2` imports the whole library, so that users get all names. Here its modules are imported without it.
PROGRAM = """
import sys, types
package = types.ModuleType("fsdp2")
package.__path__ = [{root!r}]
sys.modules["fsdp2"] = package

import torch
import torch.distributed as dist
from fsdp2 import checkpoint
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def made(device):
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


model, optimizer = made("cpu")
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
checkpoint.save({folder!r}, model=model, optimizer=optimizer)
other, its_optimizer = made("meta")
checkpoint.load({folder!r}, model=other, optimizer=its_optimizer)
for one, two in zip(model.parameters(), other.parameters(), strict=True):
    assert torch.equal(one.full_tensor(), two.full_tensor())
    assert torch.equal(optimizer.state[one]["exp_avg"].full_tensor(), its_optimizer.state[two]["exp_avg"].full_tensor())
for name in sys.modules:
    if name.startswith(("fsdp2.runtime", "fsdp2.optim", "fsdp2.api", "fsdp2.comm")):
        print(name)
"""


def test_it_imports_nothing_of_the_runtime(tmp_path: Path) -> None:
    """And saves and loads a model of torch's own FSDP2, also one on the meta device."""
    script = tmp_path / "alone.py"
    script.write_text(PROGRAM.format(root=str(ROOT / "fsdp2"), folder=str(tmp_path / "saved")))
    done = run_script(script, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.status, done.output) == (0, ""), done.errors
