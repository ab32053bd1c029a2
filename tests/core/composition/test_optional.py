"""Optional units: ranks that run a unit and ranks that do not train together, and get what one process gets that runs
the model on all ranks' batches. Further tests of them are in `test_optional_*.py`.
"""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import fsdp2
from fsdp2 import events
from tests.helpers.optional_models import (
    DIM,
    MESHES,
    POLICIES,
    check,
    counts,
    forward_and_backward,
    inputs,
    pair,
    who_has_images,
)
from tests.helpers.parity_models import batch, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks

WAYS = [(policy, mesh, reshards) for policy in POLICIES for mesh in MESHES for reshards in (False, True)]


PROTECTIVE = (("plain", "fsdp", False), ("runs_if", "hsdp", True), ("ran", "fsdp", True))


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("policy", "mesh", "reshards"),
    [pytest.param(*way, marks=() if way in PROTECTIVE else pytest.mark.exhaustive) for way in WAYS],
)
def test_training_equals_one_process(rank: int, world_size: int, policy: str, mesh: str, reshards: bool) -> None:
    """Gradients bit for bit, and None where no rank had one; AdamW with weight decay tells None from zeros."""
    hsdp = mesh_2d(2, world_size // 2) if mesh == "hsdp" else None
    plain, model = pair(POLICIES[policy], mesh=hsdp, reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (plain, model)]
    for step, with_images in enumerate(who_has_images(world_size)):
        is_exact = hsdp is None or world_size == 2
        averages = "ran" if policy == "ran" else "all"
        check(plain, model, rank, world_size, forward_and_backward(step, with_images), averages, is_exact)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            mine, wanted = local(other).detach(), shard_like(one.detach(), other)
            assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
            mine.copy_(wanted)  # the vectorised part of AdamW is another on shards; a difference would grow


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_sent_where_no_rank_runs_it(rank: int, world_size: int, policy: str) -> None:
    """With `runs_if` neither gathers nor reductions; without it the gathers, since nobody knows in advance."""
    _, model = pair(POLICIES[policy])
    forward_and_backward(0, [0])(model, rank)
    with events.record() as log:
        forward_and_backward(1, [])(model, rank)
    gathers = {"all_gather": 3} if policy == "plain" else {}
    assert counts(log, "vision") == gathers
    agreements = [each for each in log if each.kind == "agreement"]
    assert len(agreements) == (1 if policy == "plain" else 2)
    assert all(each.nbytes < 200 for each in agreements)
    with events.record() as log:
        forward_and_backward(2, [1])(model, rank)
    assert counts(log, "vision") == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 1}
    _, model = pair(False)
    with events.record() as log:
        forward_and_backward(0, range(world_size))(model, rank)
    assert not [each for each in log if each.kind == "agreement"], "nothing is optional"


@on_ranks(2)
@pytest.mark.parametrize("policy", ["plain", "runs_if"])
def test_around_the_step(rank: int, world_size: int, policy: str) -> None:
    """Evaluation, calls of the tower alone, explicit unshards, state dicts, whole parameters and copies."""
    plain, model = pair(POLICIES[policy], reshard_after_forward=policy == "plain")
    images = batch(7, rank)
    with torch.no_grad():
        assert_close(model(*inputs(0, rank, [0])), plain(*inputs(0, rank, [0])))
        assert_close(model(*inputs(0, rank, [])), plain(*inputs(0, rank, [])))
        assert_close(model.vision(images), plain.vision(images))
    assert model.state_dict()["vision.unused.weight"].shape == (DIM, DIM)
    model.vision.unshard()
    with fsdp2.full_params(model):
        assert_close(model(*inputs(1, rank, [1])), plain(*inputs(1, rank, [1])))
    model.vision.unshard()
    copied = copy.deepcopy(model)
    for sharded in (model, copied):
        sharded.vision.unshard()
        for step, with_images in ((2, [0]), (3, []), (4, [1])):
            check(plain, sharded, rank, world_size, forward_and_backward(step, with_images))

        def alone(model: Any, rank: int) -> None:
            model.vision(batch(9, rank)).square().mean().backward()

        check(plain, sharded, rank, world_size, alone)
