"""Models that torch's own `fully_shard`, its tensor parallelism, DTensors and DDP have sharded: of fsdp2 their program
needs `fsdp2.checkpoint` alone."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import checkpoint
from tests.helpers.ranks import run_on_ranks
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

FORMS = ("fsdp", "hsdp", "fsdp and tp", "dtensors", "ddp")


def made(form: str, world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b")) if world_size > 1 else None
    if form == "ddp":
        model = DistributedDataParallel(model)
    elif form == "dtensors":
        line = init_device_mesh("cpu", (world_size,))
        for layer in (model[0], model[2]):
            for name, param in [*layer.named_parameters()]:
                layer.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), line, [Shard(0)])))
    else:
        if form == "fsdp and tp" and mesh is not None:
            parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["a"]
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=None if form == "fsdp" else mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named = {f"model {name}": param for name, param in inner.named_parameters()}
    for name, param in inner.named_parameters():
        named |= {f"{key} {name}": value for key, value in optimizer.state[param].items()}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named.items()}
    return {name: each.detach().clone() for name, each in whole.items()}


def saves(rank: int, world_size: int, folder: Path, form: str, how: dict[str, Any]) -> None:
    model, optimizer = made(form, world_size, seed=1)
    train(model, optimizer)
    expected = content(model, optimizer)
    handle = checkpoint.save(folder / "run", model=model, optimizer=optimizer, step=1, **how)
    if how.get("async_op"):
        train(model, optimizer)
    handle.wait()
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def loads(rank: int, world_size: int, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt")
    for form, stepped in itertools.product(FORMS, (False, True)):
        model, optimizer = made(form, world_size, seed=2)
        if stepped:
            train(model, optimizer)
        newest = checkpoint.latest(folder / "run")
        assert newest is not None
        checkpoint.load(newest, model=model, optimizer=optimizer)
        found = content(model, optimizer)
        assert found.keys() == expected.keys(), form
        assert all(torch.equal(found[name], expected[name]) for name in expected), form
        train(model, optimizer)


HOW: list[dict[str, Any]] = [{}, {"async_op": True}, {"consolidated": True}]


@pytest.mark.parametrize(
    ("form", "world_size", "how"),
    [("fsdp", 2, HOW[0]), ("fsdp", 2, HOW[1]), ("fsdp", 2, HOW[2])]
    + [(form, 4, how) for form, how in zip(FORMS[1:], itertools.cycle(HOW))],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_saved_in_one_form_and_loaded_in_all(form: str, world_size: int, how: dict[str, Any], tmp_path: Path) -> None:
    """The optimizer's state as well, bit by bit, into optimizers that have stepped and such that have not."""
    run_on_ranks(saves, world_size, folder=tmp_path, form=form, how=how)
    run_on_ranks(loads, 4, folder=tmp_path)


# --- without the rest of fsdp2 ----------------------------------------------------------------------------------------


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


model, other = fully_shard(torch.nn.Linear(4, 8)), fully_shard(torch.nn.Linear(4, 8, device="meta"))
checkpoint.save({folder!r}, model=model, optimizer=torch.optim.AdamW(model.parameters()))
checkpoint.load({folder!r}, model=other, optimizer=torch.optim.AdamW(other.parameters()))
assert torch.equal(model.weight.full_tensor(), other.weight.full_tensor())
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
