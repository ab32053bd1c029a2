"""pytorch-optimizer, unmodified, in `matrix_optimizer`: on three ranks what one process gives, bit by bit, with even,
uneven and empty shards."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import torch
from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.optim import matrix_optimizer
from tests.helpers.matrix_optimizers import assert_same, sharded, train, values_of
from tests.helpers.ranks import on_ranks

STEP_MATRICES = ["SOAP", "Shampoo", "CAME", "Adan", "AdaFactor", "LARS", "Lion", "Fira", "Alice", "SPlus"]


@on_ranks(3)
@pytest.mark.parametrize("name", STEP_MATRICES)
def test_as_in_one_process(rank: int, world_size: int, name: str) -> None:
    kind = getattr(pytorch_optimizer, name)
    optimizers = [kind([nn.Parameter(value) for value in values_of()], lr=0.01)]
    optimizers.append(matrix_optimizer(kind, sharded(values_of()), lr=0.01))
    for each in optimizers:
        torch.manual_seed(0)
        train(each, range(4))
    assert_same(optimizers[1], optimizers[0])


@on_ranks(2)
@pytest.mark.parametrize("name", ["ScalableShampoo", "Conda"])
def test_state_of_objects_is_refused(rank: int, world_size: int, name: str) -> None:
    optimizer = matrix_optimizer(getattr(pytorch_optimizer, name), sharded(values_of()), lr=0.01)
    with pytest.raises(ArgumentError, match="state"):
        train(optimizer, range(2))
