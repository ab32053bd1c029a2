"""Optional units that are recomputed in backward, and hosts of many of them, such as a layer of experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import OptionalPolicy, events, fully_shard
from tests.helpers.optional_models import (
    POLICIES,
    Experts,
    VisionLanguage,
    assert_equal_gradients,
    counts,
    forward_and_backward,
    gradients,
    pair,
    who_has_images,
)
from tests.helpers.parity_models import batch
from tests.helpers.ranks import on_ranks


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_checkpointing_and_a_tower_that_runs_twice(
    rank: int, world_size: int, reshards: bool, use_reentrant: bool
) -> None:
    plain, model = pair(
        POLICIES["runs_if"], lambda: VisionLanguage(use_reentrant, times=2), reshard_after_forward=reshards
    )
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
        assert counts(log, "vision").get("all_gather", 0) == (3 * (1 + reshards) if with_images else 0)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [None, True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("averages", ["all", "ran"])
def test_experts_without_tokens(rank: int, world_size: int, averages: str, use_reentrant: bool | None) -> None:
    """Expert 0 gets rows on rank 0 only, expert 1 on all ranks, expert 2 on none, whose gradient stays None. The
    experts are gathered with the layer around them, in forward and again in backward."""
    torch.manual_seed(0)
    plain = Experts(use_reentrant)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, optional=OptionalPolicy(average_over=averages))
        fully_shard(layer)
    fully_shard(model)

    def run(model: Any, rank: int, step: int = 0) -> None:
        model(batch(step, rank), torch.tensor([1, 0 if rank == 0 else 1, 1])).backward()

    gradients(plain, world_size, run)
    if averages == "ran":
        for layer in plain.layers:
            for param in layer.experts[0].parameters():
                param.grad = param.grad * world_size
    for _ in range(2):
        model.zero_grad()
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
        assert model.layers[0].experts[2].weight.grad is None
        assert counts(log, "layers.0.experts.2") == {"all_gather": 2}
        assert counts(log, "layers.0.experts.0") == {"all_gather": 2, "reduce_scatter": 1}


@on_ranks(2)
@pytest.mark.parametrize("nested", [(), ("mix",), ("mix", "out")])
@pytest.mark.parametrize("others", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_one_checkpoint_around_several_hosts(rank: int, world_size: int, others: int, nested: tuple[str, ...]) -> None:
    """The recomputation of a reentrant checkpoint makes room as it goes. Expert units would have made more of it on the
    ranks that run them, which then gathered a layer that the others still had. Rank 1 runs one expert or none."""

    class Together(Experts):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            def run(x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x, chosen)
                return x

            return self.head(checkpoint(run, x.clone().requires_grad_(), use_reentrant=True)).square().mean()

    torch.manual_seed(0)
    plain = Together(None)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, optional=OptionalPolicy(runs_if=lambda x, chosen: bool((chosen < 3).any())))
        for name in nested:
            fully_shard(layer.get_submodule(name))
        fully_shard(layer)
    fully_shard(model)

    def run(model: Any, rank: int) -> None:
        model(batch(0, rank), torch.tensor([0, 1, 2] if rank == 0 else [others] * 3)).backward()

    gradients(plain, world_size, run)
    run(model, rank)
    assert_equal_gradients(plain, model)
    with events.record() as log:
        model(batch(0, rank), torch.tensor([3, 3, 3])).backward()
    assert counts(log, "layers.0.experts.0") == {}  # nor are they gathered in backward, where the layer is
    assert counts(log, "layers.0")["all_gather"] >= 2
