"""`torch.distributed.pipelining` over stages that `fully_shard` shards: every schedule, bitwise as on torch's FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from tests.clients.clients import Run, library_of, run_both

NUM_MICROBATCHES = 4
ONE_STAGE = ["Schedule1F1B", "ScheduleGPipe"]
TWO_STAGES = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"]
SPLIT_BACKWARD = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def stage_indices(rank: int, num_ranks: int, schedule: str) -> list[int]:
    """Which stages a rank of the pipeline has: one, two in a loop, or two in a V."""
    if schedule in ONE_STAGE:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank if "V" in schedule else rank + num_ranks]


def pipeline(schedule: str, pp: int, dp: int, steps: int, reshard: bool = False, bf16: bool = False) -> Run:
    """Train a pipeline of `pp` ranks, each stage sharded over `dp` ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    mine = stage_indices(mesh.get_local_rank("pp"), pp, schedule)
    num_stages = pp * len(mine)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2 * num_stages)]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32) if bf16 else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": policy, "reshard_after_forward": reshard}
    stages = {index: nn.Sequential(*blocks[2 * index : 2 * index + 2]) for index in mine}
    for model in stages.values():
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)

    parts = [
        PipelineStage(m, i, num_stages, torch.device("cpu"), group=mesh.get_group("pp")) for i, m in stages.items()
    ]
    single = schedule in ONE_STAGE
    plan: Any = getattr(schedules, schedule)(
        parts[0] if single else parts, n_microbatches=NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.AdamW([param for model in stages.values() for param in model.parameters()], lr=1e-2)
    torch.manual_seed(100 + mesh.get_local_rank("dp"))
    losses: list[list[float]] = []
    norms: list[float] = []
    for _ in range(steps):
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        each: list[Tensor] = []
        last = num_stages - 1 in mine
        plan.step(*([x] if 0 in mine else []), **({"target": y, "losses": each} if last else {}))
        for model in stages.values():  # each by itself: torch has no norm over the ranks of a pipeline
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    values: dict[str, Any] = {"norms": norms}
    values |= {f"{i}.{n}": p.full_tensor() for i, model in stages.items() for n, p in model.state_dict().items()}
    return Run(losses, library_of(*stages.values()), values)


@pytest.mark.parametrize("reshard", [False, True], ids=["kept", "resharded"])
@pytest.mark.parametrize("schedule", ONE_STAGE + TWO_STAGES)
def test_schedules(schedule: str, reshard: bool) -> None:
    both = run_both(pipeline, 4, schedule=schedule, pp=2, dp=2, steps=3, reshard=reshard)
    both.assert_equal()
    losses = [step for run in both.ours for step in run.losses if step]
    assert len(losses) == 2 * 3 and all(len(step) == NUM_MICROBATCHES for step in losses)


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_schedules_that_split_backward(schedule: str) -> None:
    """Parameters are kept after forward: with resharding these lose gradients, on either library."""
    run_both(pipeline, 4, schedule=schedule, pp=2, dp=2, steps=3).assert_equal()


def test_two_ranks_and_mixed_precision() -> None:
    """A pipeline of two ranks whose stages are sharded over one rank each, with the policy at work: 20 steps."""
    both = run_both(pipeline, 2, schedule="ScheduleInterleaved1F1B", pp=2, dp=1, steps=20, bf16=True)
    both.assert_equal()
    assert len(both.ours[0].losses) == 20 and min(both.ours[0].values["norms"]) > 0.0
    assert not any(step for step in both.ours[0].losses) and all(step for step in both.ours[1].losses)


def test_gradients_are_reduced_once_a_step() -> None:
    """Not once a microbatch, though the schedule runs the backward of each: as many reductions as units."""
    both = run_both(pipeline, 4, schedule="Schedule1F1B", pp=2, dp=2, steps=3)
    for run in both.ours:
        assert run.events["reduce_scatter"] == 3 * 2, (
            run.events
        )  # two blocks a stage; the stage itself has no parameters
