"""Optional units in steps of several forwards or backwards: which gradients are reduced, and what divides them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.optional_models import (
    MESHES,
    POLICIES,
    TURNS,
    assert_equal_gradients,
    gradients,
    inputs,
    micro_batches,
    pair,
)
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks


@on_ranks(2, 4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("turn", TURNS)
def test_accumulation(rank: int, world_size: int, turn: str, mesh: str) -> None:
    """Several microbatches in a step, of which some ranks have images in some. The last brings none to anybody."""
    plain, model = pair(POLICIES["runs_if"], mesh=mesh_2d(2, world_size // 2) if mesh == "hsdp" else None)
    for with_images in ([[0], [1], []], [[], [0, 1], [0]], [[], [], []], [[1], [], [0]]):
        for each in (plain, model):
            each.zero_grad()
        run = micro_batches(with_images, TURNS[turn])
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)


@on_ranks(2)
def test_average_over_those_that_ran_in_a_step_of_several_backwards(rank: int, world_size: int) -> None:
    """Without sync the sum is divided once, by the number of ranks that have gradients at the reduction."""
    plain, model = pair(POLICIES["ran"])
    run = micro_batches([[0], [1], []], TURNS["unsynced"])
    gradients(plain, world_size, run, "ran")  # both ranks have gradients in the end
    run(model, rank)
    assert_equal_gradients(plain, model, exact=False)


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["one backward", "in order", "reversed", "last before first"])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_two_forwards_before_a_backward(rank: int, world_size: int, reshards: bool, order: str) -> None:
    """Of one forward's batches nobody has images, of the other's one rank: each backward gathers what its own forward
    gathered."""
    plain, model = pair(POLICIES["runs_if"], reshard_after_forward=reshards)
    for first, second in (([], [0]), ([1], []), ([0], [1])):

        def run(model: Any, rank: int, first: Any = first, second: Any = second) -> None:
            losses = [model(*inputs(step, rank, ranks)) for step, ranks in ((0, first), (1, second))]
            if order == "one backward":
                (losses[0] + losses[1]).backward()
            elif order == "last before first":
                losses[0].backward()
                third = model(*inputs(2, rank, []))
                losses[1].backward()
                third.backward()
            else:
                for loss in losses if order == "in order" else reversed(losses):
                    loss.backward()

        for each in (plain, model):
            each.zero_grad()
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
