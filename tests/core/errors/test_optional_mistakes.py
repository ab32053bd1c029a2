"""Optional units: what is refused, what is found while a step runs, and training after an exception."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import ArgumentError, OptionalPolicy, OrderError, UnsupportedError, fully_shard
from tests.helpers.optional_models import (
    POLICIES,
    Experts,
    VisionLanguage,
    check,
    forward_and_backward,
    has_images,
    inputs,
    pair,
)
from tests.helpers.parity_models import batch
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_an_exception_in_the_tower(rank: int, world_size: int) -> None:
    """After `reset_iter_state` on all ranks the next batch is computed as if the failed one had not been."""
    plain, model = pair(POLICIES["runs_if"])

    def fail(*_: Any) -> None:
        raise ValueError("a broken image")

    for place in (model.vision.blocks[1], model.blocks[1]):
        handle = place.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="a broken image"):
            model(*inputs(0, rank, [0, 1]))
        handle.remove()
        model.reset_iter_state()
    output = model(*inputs(0, rank, [1]))
    output.register_hook(fail)
    with pytest.raises(ValueError, match="a broken image"):
        output.backward()
    model.reset_iter_state()
    check(plain, model, rank, world_size, forward_and_backward(1, [0]))


@on_ranks(2)
@pytest.mark.parametrize("others", [[], [0, 1]])
def test_a_unit_that_runs_against_the_agreement(rank: int, world_size: int, others: list[int]) -> None:
    """It raises on the ranks that had said that they would not run it, whatever the others said."""
    _, model = pair(OptionalPolicy(runs_if=lambda text, images=None: bool(others) and has_images(text, None)))
    with pytest.raises(OrderError, match="optional unit 'vision' runs, but runs_if of 'vision' returned False"):
        model(*inputs(0, rank, [0, 1]))
    model.reset_iter_state()
    model(*inputs(0, rank, [])).backward()


@on_ranks(2)
def test_a_unit_that_runs_outside_of_its_host(rank: int, world_size: int) -> None:
    """The host, `layers.0`, has not gathered it; on one rank alone it would wait for the other forever."""
    model: Any = Experts(None)
    for expert in model.layers[0].experts:
        fully_shard(expert, optional=True)
    fully_shard(model.layers[0])
    fully_shard(model)
    model.register_forward_pre_hook(lambda _, args: model.layers[0].experts[0](args[0]) and None)
    with pytest.raises(OrderError, match=r"optional unit 'layers\.0\.experts\.0' runs outside of the forward"):
        model(batch(0, rank), torch.tensor([0, 0, 0]))


@on_ranks(2)
def test_policies_that_cannot_work(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="average_over: expected 'all' or 'ran', got 'some'"):
        OptionalPolicy(average_over="some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="runs_if: expected a function or None, got True"):
        OptionalPolicy(runs_if=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"optional: expected a bool .*Pass OptionalPolicy\(runs_if=has_images\)"):
        fully_shard(nn.Linear(2, 2), optional=has_images)
    model: Any = fully_shard(nn.Linear(2, 2), optional=True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="the root is an optional unit"):
            model(torch.ones(1, 2))
    _, model = pair(OptionalPolicy(runs_if=lambda text, images=None: torch.tensor(True)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match=r"unit 'vision': expected a bool from runs_if, got tensor\(True\)"):
        model(*inputs(0, rank, [0]))


@on_ranks(2)
@pytest.mark.parametrize("is_owner", [True, False])
def test_weights_shared_with_a_unit_that_all_ranks_run(rank: int, world_size: int, is_owner: bool) -> None:
    model = VisionLanguage()
    model.projector.weight = model.vision.unused.weight
    if not is_owner:
        fully_shard(model.projector)
    fully_shard(model.vision, optional=True)
    fully_shard(model)
    with pytest.raises(UnsupportedError, match="share a weight"):
        model(*inputs(0, rank, [0]))
