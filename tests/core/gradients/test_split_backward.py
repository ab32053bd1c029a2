"""Gradients of inputs and of weights that are asked for one after the other, as zero-bubble pipelines do. The schedules
themselves are in `tests/parallel/test_pipelining.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fsdp2
from tests.helpers.models import run_step
from tests.helpers.parity_models import Layers, assert_gradients, batch, mean_gradients, shard_blocks
from tests.helpers.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("as_a_stage", [False, True])
def test_gradients_of_inputs_alone(rank: int, world_size: int, as_a_stage: bool) -> None:
    """A user may ask for them before backward. When a pipeline schedule does, a stage that reshards loses gradients of
    its weights: a stage of torch 2.15, which neither reduces nor reshards until `finalize_backward`."""
    plain = Layers(2)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), reshard_after_forward=True)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not as_a_stage)
    x = batch(0, rank, dim=4).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x)
    if not as_a_stage:
        run_step(model, rank, 1)
    model.set_requires_gradient_sync(True)
    if as_a_stage:
        with pytest.raises(fsdp2.OrderError, match="splits backward lost gradients"):
            model.finalize_backward()
        return
    model.finalize_backward()
    assert_gradients(model, mean_gradients(plain, world_size, lambda model, rank: run_step(model, rank, 1)))
