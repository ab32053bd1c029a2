"""A unit that runs several times in one step, some of them under a reentrant checkpoint.

torch's FSDP2 (2.13) gives other gradients than one process where a reentrant checkpoint comes first: inner backwards
end the unit's backward before all of its uses are through. So one process is the reference here.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.parity_models import assert_gradients, batch, mean_gradients, mesh_2d
from tests.helpers.ranks import on_ranks

# Which unit runs, in order; a capital under a checkpoint. The first eight are wrong on torch with reentrant ones.
ROUTES = ["AA", "Aa", "AaA", "AAB", "BAA", "ABAB", "AbA", "ABBA", "A", "aA", "aBA", "aabAbBa"]


class Routed(nn.Module):
    def __init__(self, route: str, use_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.route, self.use_reentrant = route, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for name in self.route:
            unit = getattr(self, name.lower())
            x = torch.tanh(checkpoint(unit, x, use_reentrant=self.use_reentrant) if name.isupper() else unit(x))
        return x


def sharded(plain: nn.Module, mesh: Any = None) -> Any:
    model: Any = copy.deepcopy(plain)
    for unit in (model.a, model.b):
        fsdp2.fully_shard(unit, mesh=mesh)
    return fsdp2.fully_shard(model, mesh=mesh)


@on_ranks(2, 4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_as_in_one_process(rank: int, world_size: int, route: str, use_reentrant: bool) -> None:
    """Two steps of two microbatches: the gradients of one process, and every unit resharded at the end."""
    plain = Routed(route, use_reentrant)
    model = sharded(plain, mesh_2d(2, world_size // 2) if world_size > 2 else None)
    params = list(model.parameters())

    def microbatches(m: Any, r: int) -> None:
        for micro in range(2):
            if m is model:
                model.set_requires_gradient_sync(micro == 1)
            m(batch(micro, r, 4).requires_grad_()).square().sum().backward()

    for _ in range(2):
        microbatches(model, rank)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert_gradients(model, mean_gradients(plain, world_size, microbatches))
        model.zero_grad()
