"""Uneven sharding on any dim, which torch's FSDP2 refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.helpers.parity_models import full, local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.trained_alike import SETTINGS, options, train


class Cube(nn.Module):
    """A parameter of three dims, none of which divides by two, one smaller than the worlds; and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 7, 1) / 2)
        self.matrix = nn.Parameter(torch.randn(7, 5) / 3)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,ijk->bjk", x[:, :3], self.cube).squeeze(2)
        return torch.tanh(hidden) @ self.matrix + self.bias


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dim", [1, 2, -2])
def test_uneven_dims(rank: int, world_size: int, setting: str, dim: int) -> None:
    """Behaviour 28, 186: `torch.chunk` along any dim, ranks with fewer columns or none included."""
    given = options(setting, world_size)

    def place(param: nn.Parameter) -> Shard:
        return Shard(dim) if -param.ndim <= dim < param.ndim else Shard(param.ndim - 1)

    model = train(rank, world_size, Cube, lambda api, m: api.fully_shard(m, shard_placement_fn=place, **given))
    for param in model.parameters():
        assert local(param).shape == shard_like(full(param), param).shape
        assert param.placements[-1].dim == place(param).dim % param.ndim
