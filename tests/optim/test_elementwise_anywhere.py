"""`local_optimizer` and `clip_grad_norm_`: what one process gives, on any number and arrangement of ranks, and after a
checkpoint of another number of ranks. (`test_local_optimizer.py` compares with torch on as many ranks.)"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.optim import local_optimizer, offload_optimizer
from tests.helpers.matrix_optimizers import layouts, sharded, train, value
from tests.helpers.optimizers import CASES, Optim, params_in
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks

# Even and uneven rows, fewer rows than ranks, one row, one column, and sizes that fill no vector register.
SHAPES = [(8, 3), (5, 2), (3, 7), (1, 4), (6, 1), (16, 16), (33, 5)]


def wholes(seed: int = 0) -> list[Tensor]:
    return [value(index, shape, seed) for index, shape in enumerate(SHAPES)]


def optimizer_of(case: str, params: Any) -> Optim:
    kind, options = CASES[case]
    return local_optimizer(kind, params, **{"lr": 0.1, **options})


def snapshot(optimizer: Optim) -> list[Tensor]:
    """Parameters and states, whole. Collective."""
    found = [full(param).detach().clone() for param in params_in(optimizer)]
    for param in params_in(optimizer):
        state = optimizer.state.get(param, {})
        found += [full(state[name]).clone() for name in sorted(state) if isinstance(state[name], Tensor)]
    return found


@on_ranks(2, 1, 3, 4)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(rank: int, world_size: int, case: str) -> None:
    """Bit by bit, with a parameter that gets its first gradient later. torch's fused kernels on the CPU round elements
    that do not fill a vector register differently from the rest, and which these are depends on the shards."""
    kind, options = CASES[case]
    plain = kind([nn.Parameter(whole) for whole in wholes()], **{"lr": 0.1, **options})
    train(plain, range(4), missing={(0, 1)})
    for layout in layouts(world_size):
        optimizer = optimizer_of(case, sharded(wholes(), layout))
        train(optimizer, range(4), missing={(0, 1)})
        rtol, atol = (1e-6, 1e-7) if options.get("fused") else (0.0, 0.0)
        torch.testing.assert_close(snapshot(optimizer), snapshot(plain), rtol=rtol, atol=atol)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fused", "offloaded"])
def test_the_state_of_one_process(rank: int, world_size: int, kind: str) -> None:
    """`load_state_dict` takes whole tensors for sharded parameters. Each rank stepped with the rows of rank 0."""
    make = local_optimizer if kind == "fused" else offload_optimizer
    policy = {} if kind == "fused" else {"offload_policy": fsdp2.Offload()}
    plain, other = (nn.ParameterList(wholes()) for _ in range(2))
    alone = torch.optim.AdamW(plain, lr=1e-2, fused=True)
    train(alone, range(1, 2))
    other.load_state_dict(plain.state_dict())
    model: Any = fsdp2.fully_shard(Holder(other), **policy)
    optimizer = make(torch.optim.AdamW, model.parameters(), lr=1e-2, fused=True)
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    for each in (alone, optimizer):
        train(each, range(2, 4))
    for param, own in zip(plain, other, strict=True):
        torch.testing.assert_close(full(own), param, rtol=0, atol=1e-6)


class Holder(nn.Module):
    """Something to shard."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: Tensor) -> Tensor:
        return x
