"""A trace of `torch.profiler` shows the phases of a step, under the names that torch's FSDP2 gives them.

A program that was migrated, and whose users looked at its traces, showed none of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp2
import fsdp2.checkpoint
from fsdp2.events import profiler_range
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
    for counter in (torchs, ours):
        for name in [name for name in counter if phase(name) in NOT_HERE | ELSEWHERE | HERE_ALONE]:
            del counter[name]
    assert ours == torchs
    assert ours["FSDP::all_gather (0)"] == 2 and ours["FSDP::pre_forward (1)"] == 1


@on_ranks(2)
def test_waits_for_reductions_are_named(rank: int, world_size: int) -> None:
    names = {name for name in ranges(trained(fsdp2)) if phase(name) in ELSEWHERE}
    assert names and names <= {f"FSDP::post_backward_rs_wait{where}" for where in ("", " (0)", " (1)", " (2)")}


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


@on_ranks(2)
def test_staging_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    """What an asynchronous save costs the trainer."""
    model = trained(fsdp2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        fsdp2.checkpoint.save(str(tmp_path / "checkpoint"), model=model, async_op=True).wait()
    assert [event.name for event in trace.events() if "FSDP::checkpoint" in event.name] == ["FSDP::checkpoint_stage"]


@on_ranks(2)
def test_ranges_nest(rank: int, world_size: int) -> None:
    """What a step does is below the phase that does it: a trace can be read from the outside in."""
    model = trained(fsdp2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model)
    by_name = {event.name: event for event in trace.events()}
    gather = by_name["FSDP::all_gather_copy_out (1)"]
    parents = []
    while gather.cpu_parent is not None:
        gather = gather.cpu_parent
        parents.append(gather.name)
    assert any(name in ("FSDP::pre_forward (1)", "FSDP::pre_backward (1)") for name in parents)


def test_nothing_is_made_without_a_profiler() -> None:
    """`record_function` costs microseconds even where nobody records."""
    assert profiler_range("FSDP::all_gather", "0") is profiler_range("FSDP::pre_forward", "1")


def test_the_page_lists_the_ranges() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "fsdp2").rglob("*.py") if path.name != "events.py")
    names = {part.partition('"')[0].removesuffix(" for") for part in source.split('"FSDP::')[1:]}
    assert len(names) >= 16
    assert [name for name in sorted(names) if f"FSDP::{name}" not in page] == []
