"""For tests that `FSDP_API=torch` runs on torch's own FSDP2, which shows that what they expect is what users know: the
implementation under test, and a training on it that is compared with one process.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn

import fsdp2
from tests.helpers.models import reference_grads, run_step
from tests.helpers.parity_models import assert_gradients, shard_blocks

ON_TORCH = os.environ.get("FSDP_API") == "torch"


api: Any = torch.distributed.fsdp if ON_TORCH else fsdp2


def sharded(plain: nn.Module, **options: Any) -> Any:
    return shard_blocks(api, copy.deepcopy(plain), **options)


def train(model: Any, plain: nn.Module, rank: int, world_size: int, dim: int, steps: int = 2) -> None:
    """Steps of SGD, with gradients compared to one process at each."""
    for step in range(steps):
        expected = reference_grads(plain, world_size, step, dim)
        model.zero_grad()
        run_step(model, rank, step, dim)
        assert_gradients(model, expected)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
            for name, param in plain.named_parameters():
                param -= 0.1 * expected[name]
