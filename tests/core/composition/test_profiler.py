"""The log, and a trace of `torch.profiler`: the phases of a step, under the names that torch's FSDP2 gives them."""

from collections import Counter
from typing import Any
from unittest import TestCase

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp2
import fsdp2.checkpoint
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Layers, batch
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT

# The gradient is accumulated where it is reduced from: there is no such phase here.
NOT_HERE = {"FSDP::post_backward_accumulate"}
# torch waits for the reduction of the unit before, once a unit; here the last of a unit's groups is waited for.
ELSEWHERE = {"FSDP::post_backward_rs_wait"}
# The steps of a reduction, which torch does not name.
HERE_ALONE = {"FSDP::reduce_scatter", "FSDP::all_reduce", "FSDP::hand_over"}


def trained(api: Any) -> nn.Module:
    """Three blocks in bf16, the first of which prefetches the second, and a root with parameters."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 8))
    for block in blocks:
        api.fully_shard(block, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    api.fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    step(model)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()


def ranges(model: nn.Module) -> Counter[str]:
    """How often each range of FSDP was in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model)
    return Counter(event.name for event in trace.events() if event.name.startswith("FSDP::"))


def phase(name: str) -> str:
    return name.partition(" ")[0]


@on_ranks(2)
def test_a_trace_has_torchs_ranges(rank: int, world_size: int) -> None:
    torchs, ours = ranges(trained(torch_fsdp)), ranges(trained(fsdp2))
    waits = {name for name in ours if phase(name) in ELSEWHERE}
    assert waits and waits <= {f"FSDP::post_backward_rs_wait{where}" for where in ("", " (0)", " (1)", " (2)")}
    for counter in (torchs, ours):
        for name in [name for name in counter if phase(name) in NOT_HERE | ELSEWHERE | HERE_ALONE]:
            del counter[name]
    assert ours == torchs
    assert ours["FSDP::all_gather (0)"] == 2 and ours["FSDP::pre_forward (1)"] == 1


@on_ranks(2)
def test_the_steps_of_a_reduction_are_named(rank: int, world_size: int) -> None:
    """Whether a step is long because of its communication, or of what follows on the gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fsdp2.fully_shard(model[0], mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizer = fsdp2.local_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    names = Counter(event.name for event in trace.events())
    for kind in HERE_ALONE:
        assert names[f"{kind} (0)"] == names[kind] == 2
    assert names["Optimizer.step#LocalSGD.step"] == 1, "torch's own"


def test_the_page_lists_the_ranges() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "fsdp2").rglob("*.py") if path.name != "events.py")
    names = {part.partition('"')[0].removesuffix(" for") for part in source.split('"FSDP::')[1:]}
    assert len(names) >= 16
    assert [name for name in sorted(names) if f"FSDP::{name}" not in page] == []


@on_ranks(2)
def test_log(rank: int, world_size: int) -> None:
    """Behaviour 174: at DEBUG level the logger "fsdp2" tells what happens, with the units' names."""
    model = in_units(Layers(1))
    with TestCase().assertLogs("fsdp2", "DEBUG") as found:
        model(batch(0, rank, 4)).sum().backward()
    messages = [record.getMessage() for record in found.records]
    for start in (
        *("pre_forward layers.0", "post_forward layers.0", "pre_backward layers.0", "post_backward layers.0"),
        *("root_pre_forward", "root_post_backward"),
    ):
        assert any(message.startswith(start) for message in messages), start
    with TestCase().assertNoLogs("fsdp2", "INFO"):
        model(batch(0, rank, 4))
