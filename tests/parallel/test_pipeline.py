"""Stages of torch's pipelines made by `parallelize`, with every other kind of parallelism, against one process."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

from fsdp2 import FSDPModule, events
from fsdp2.errors import ArgumentError
from fsdp2.parallel import build_meshes, parallelize
from tests.helpers.models import error_of
from tests.helpers.parallel_models import (
    DecoderBlock,
    Lm,
    check,
    config_of,
    global_batch,
    loss_of,
    mean_over,
    name_of,
    part_of,
    tensor_plan,
)
from tests.helpers.parity_models import local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import quiet

NUM_MICROBATCHES = 2
WITH_PIPELINE = {
    2: [{"pipeline": 2}],
    4: [
        {"pipeline": 2, "shard": 2},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "context": 2},
    ],
}


class Stage(nn.Module):
    """The blocks of an `Lm` with these indices, and its ends if they are the first or the last ones."""

    def __init__(self, whole: Lm, indices: Sequence[int]) -> None:
        super().__init__()
        self.embed = whole.embed if 0 in indices else None
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in indices})
        is_last = len(whole.blocks) - 1 in indices
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None else self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def race(degrees: dict[str, int], num_stages: int, **more: Any) -> list[events.Event]:
    """Two steps of a pipeline and of one process; what happened in the second."""
    config = config_of(degrees, **more)
    meshes = build_meshes(config, "cpu")
    torch.manual_seed(0)
    plain = Lm(depth=4)
    whole = copy.deepcopy(plain)
    per_stage = 4 // num_stages
    stages: dict[int, Any] = {}
    for index in meshes.stage_indices(num_stages):
        stage = Stage(whole, range(per_stage * index, per_stage * (index + 1)))
        stages[index] = parallelize(stage, config, meshes=meshes, blocks=DecoderBlock, tp_plan=tensor_plan())
    assert meshes.pipeline is not None
    group = meshes.pipeline.get_group()
    parts = [PipelineStage(stage, i, num_stages, torch.device("cpu"), group=group) for i, stage in stages.items()]
    kind: Any = Schedule1F1B if len(parts) == 1 else ScheduleInterleaved1F1B
    schedule = kind(parts[0] if len(parts) == 1 else parts, NUM_MICROBATCHES, loss_fn=token_loss)
    params = {name: param for stage in stages.values() for name, param in stage.named_parameters()}
    optims = [torch.optim.SGD(each, lr=0.5, momentum=0.9) for each in (params.values(), plain.parameters())]
    for step in range(2):
        batch = global_batch(step)
        inputs, targets = part_of(meshes, batch)
        losses: list[Tensor] = []
        is_last = num_stages - 1 in stages
        with quiet(), events.record() as log:
            schedule.step(
                *([inputs] if 0 in stages else []), **({"target": targets, "losses": losses} if is_last else {})
            )
        expected = loss_of(plain, batch[:, :-1], batch[:, 1:])
        expected.backward()
        if is_last:
            check(f"step {step}: loss", mean_over(meshes.loss, torch.stack(losses).mean()), expected, 1e-4, 1e-6)
        for name, other in plain.named_parameters():
            if name in params:
                what = f"step {step}: gradient of {name}"
                check(what, local(params[name].grad), shard_like(other.grad, params[name]), 1e-4, 1e-6)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return list(log)


@on_ranks(2)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_two_ranks(rank: int, world_size: int, num_stages: int) -> None:
    race({"pipeline": 2}, num_stages)


@on_ranks(4)
@pytest.mark.parametrize("degrees", WITH_PIPELINE[4], ids=name_of)
def test_four_ranks(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    race(degrees, 2)


@on_ranks(4)
def test_several_stages_with_checkpointing(rank: int, world_size: int) -> None:
    race({"pipeline": 2, "shard": 2}, 4, activation_checkpointing="full")


@on_ranks(4)
@pytest.mark.parametrize("reshard", [None, True])
def test_stages_stay_gathered_by_default(rank: int, world_size: int, reshard: bool | None) -> None:
    """Each of a stage's two blocks is gathered once a step, rather than for each microbatch and direction."""
    log = race({"pipeline": 2, "shard": 2}, 2, reshard_after_forward=reshard)
    blocks = [event for event in log if event.kind == "all_gather" and event.unit]
    assert len(blocks) == 2 if reshard is None else len(blocks) > 2 * NUM_MICROBATCHES, blocks


@on_ranks(2)
def test_a_plan_for_the_whole_model_fits_its_stages(rank: int, world_size: int) -> None:
    """Names of other stages' modules match nothing here; a plan none of whose names does is an error all the same."""
    meshes = build_meshes(config_of({"tensor": 2}), "cpu")
    plan = {**tensor_plan(), "embed_tokens": "embedding_rowwise"}
    stage = Stage(Lm(depth=2), [1])
    message = error_of(ArgumentError, lambda: parallelize(stage, meshes.config, blocks=DecoderBlock, tp_plan=plan))
    assert message == "tp_plan: no module of this Stage is named 'embed_tokens'"
    assert not isinstance(stage, FSDPModule)
