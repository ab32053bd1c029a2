"""`offload_activations`: what needs no device. On the lagging device: `activations` in tests/device/scenarios.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.extras.activations import calls_to_move
from tests.helpers.parity_models import Stack, batch, shard_blocks
from tests.helpers.ranks import on_ranks


def test_the_first_calls_move_until_the_rest_fits() -> None:
    assert calls_to_move([4, 4, 4, 4], 16) == [False] * 4
    assert calls_to_move([4, 4, 4, 4], 15) == [True, False, False, False]
    assert calls_to_move([1, 9, 2, 4], 6) == [True, True, False, False]
    assert calls_to_move([1, 2], 0) == [True, True]
    assert calls_to_move([], 0) == []


@on_ranks(2)
def test_on_the_cpu_nothing_moves(rank: int, world_size: int) -> None:
    """The same gradients and nothing copied, with `fully_shard` before and after; copies and removal are ordinary."""
    results = []
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        model: Any = Stack(dim=8, hidden=5, depth=3)
        offload = fsdp2.offload_activations(model.blocks, min_bytes=0) if when == "before" else None
        shard_blocks(fsdp2, model)
        if when == "after":
            offload = fsdp2.offload_activations(model.blocks, min_bytes=0)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            each(batch(0, rank)).square().mean().backward()
            results.append([param.grad.full_tensor() for param in each.parameters()])
        if offload is not None:
            assert offload.saved_bytes == offload.moved_bytes == 0
            offload.remove()
            model(batch(0, rank)).square().mean().backward()
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_what_is_refused() -> None:
    block = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="expected modules"):
        fsdp2.offload_activations([])
    with pytest.raises(ArgumentError, match="budget: expected a number of bytes"):
        fsdp2.offload_activations([block], budget=-1)
    with pytest.raises(ArgumentError, match="block 1, a Linear, is inside another"):
        fsdp2.offload_activations([block, block[0]])
    offload = fsdp2.offload_activations([block])
    with pytest.raises(MisuseError, match="offloaded already"):
        fsdp2.offload_activations([block])
    offload.remove()
    fsdp2.offload_activations([block])
