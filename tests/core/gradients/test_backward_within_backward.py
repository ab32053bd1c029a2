"""A custom function whose backward runs backwards of its own: an MLP tiled over the sequence, chunked checkpoints.

Each of the inner backwards completed all gradients of the unit, and so each started a reduction: one for each tile,
and a size mismatch where the number of tiles went by each rank's sequence length.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.parity_models import Race, batch, count, shard_blocks
from tests.helpers.ranks import on_ranks

RARE = pytest.mark.exhaustive


class Tiled(torch.autograd.Function):
    """`mlp` over tiles of the rows; only one tile's activations at a time, as ALST's TiledMLP."""

    @staticmethod
    def forward(ctx: Any, mlp: Any, x: Tensor, num_tiles: int, *_weights: Tensor) -> Tensor:
        ctx.mlp, ctx.num_tiles, ctx.num_weights = mlp, num_tiles, len(_weights)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([mlp(tile) for tile in x.chunk(num_tiles)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        grads = []
        for tile, tile_grad in zip(x.chunk(ctx.num_tiles), grad.chunk(ctx.num_tiles), strict=True):
            inner = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.mlp(inner)
            torch.autograd.backward(out, tile_grad)
            grads.append(inner.grad)
        return None, torch.cat(grads), None, *[None] * ctx.num_weights


class Mlp(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.how, self.num_tiles = how, 1

    def whole(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "tiled":  # autograd knows the weights of the function
            return Tiled.apply(self.whole, x, self.num_tiles, *self.parameters())
        if self.how == "hidden":
            return Tiled.apply(self.whole, x, self.num_tiles)
        chunks = x.chunk(self.num_tiles)
        return torch.cat([checkpoint(self.whole, chunk, use_reentrant=self.how == "reentrant") for chunk in chunks])


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), Mlp(how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """`checkpointed` checkpoints each block too, around its inner backwards."""

    def __init__(self, how: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.layers: Any = nn.ModuleList(Block(how) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def step_of(model: Any, step: int, rank: int, *, more_tiles: bool) -> Tensor:
    """Rank r has 3 tiles, or 3 + r."""
    for layer in model.layers:
        layer.mlp.num_tiles = 3 + rank * more_tiles
    loss = model(torch.cat([batch(step + index, rank, 4) for index in range(4)])).square().mean()
    loss.backward()
    return loss.detach()


def shard(api: ModuleType, model: Any, raf: bool = True) -> Any:
    for layer in model.layers:
        api.fully_shard(layer.mlp, reshard_after_forward=raf)
    return shard_blocks(api, model, reshard_after_forward=raf)


@on_ranks(2)
@pytest.mark.parametrize(
    "how", ["tiled", "reentrant", *(pytest.param(how, marks=RARE) for how in ("hidden", "non_reentrant"))]
)
@pytest.mark.parametrize("more_tiles", [True, pytest.param(False, marks=RARE)], ids=["tiles_by_rank", "same_tiles"])
@pytest.mark.parametrize("raf", [True, pytest.param(False, marks=RARE)])
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=RARE)], ids=["plain", "checkpointed"])
def test_training(rank: int, world_size: int, how: str, more_tiles: bool, raf: bool, checkpointed: bool) -> None:
    Race(
        rank,
        world_size,
        lambda: Stack(how, checkpointed),
        lambda api, model: shard(api, model, raf),
        lambda model, step, rank: step_of(model, step, rank, more_tiles=more_tiles),
    ).run(3)


class ReduceScatters(TorchDispatchMode):
    """Counts those that are issued through torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
@pytest.mark.parametrize("how", ["tiled", "hidden", "reentrant"])
def test_collectives(rank: int, world_size: int, how: str) -> None:
    """As many as torch has: one reduction a unit, at the end of the unit's own backward."""
    ours, theirs = shard(fsdp2, Stack(how)), shard(torch_fsdp, Stack(how))
    with fsdp2.events.record() as log:
        step_of(ours, 0, rank, more_tiles=True)
    with ReduceScatters() as reduce_scatters:
        step_of(theirs, 0, rank, more_tiles=True)
    assert count(log, "reduce_scatter") == {"reduce_scatter": 7}
    assert reduce_scatters.count == 7
