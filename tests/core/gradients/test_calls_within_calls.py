"""A forward within one of the same unit (nets that call themselves, adapters): the inner one resharded the unit."""

import copy
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.one_process import check
from tests.helpers.parity_models import Race, batch, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.helpers.two_units import shard


def step(model: nn.Module, rank: int) -> None:
    one_batch(model, 0, rank)


class Tree(nn.Module):
    """A recursive net: a node joins what two smaller trees say."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return torch.tanh(self.leaf(x))
        return torch.tanh(self.join(self(x, depth - 1) + self(x / 2, depth - 1)))


class Asking(nn.Module):
    """A block that asks the whole model for another opinion, and goes on with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, model: Any) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x if model is None else self.linear(x + model(x, asks=False))


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Asking(), Asking()])

    def forward(self, x: Tensor, asks: bool = True) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, self if asks else None)
        return self.out(x)


def shard_all(api: ModuleType, model: nn.Module, raf: bool | None) -> None:
    for child in [*getattr(model, "blocks", ()), *(c for c in model.children() if isinstance(c, nn.Linear))]:
        api.fully_shard(child, reshard_after_forward=raf)
    shard_root(api, model, raf)


def shard_root(api: ModuleType, model: nn.Module, raf: bool | None) -> None:
    api.fully_shard(model, reshard_after_forward=raf)


@on_ranks(2)
@pytest.mark.parametrize("build", [Tree, Asked])
@pytest.mark.parametrize("how", [shard_all, shard_root])
@pytest.mark.parametrize("raf", [True, None])
def test_training(rank: int, world_size: int, build: type, how: Any, raf: bool | None) -> None:
    """torch's FSDP2 (2.13) can do it where the unit does not reshard after forward."""
    can = raf is None and build is Tree and how is shard_all
    Race(rank, world_size, build, partial(how, raf=raf), one_batch, torch=can).run(3)


class Picky(Tree):
    """Raises in its innermost calls."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0 and self.error is not None:
            raise self.error
        return super().forward(x, depth)


@on_ranks(2)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_within(rank: int, world_size: int, error: type[BaseException]) -> None:
    """A forward that raised three calls deep is over. (torch calls no hooks after a KeyboardInterrupt.)"""
    plain = Picky()
    model = copy.deepcopy(plain)
    shard_all(fsdp2, model, True)
    params = [*plain.parameters(), *model.parameters()]  # as an optimizer holds them
    for _ in range(2):
        model.error = error
        with pytest.raises(error):
            step(model, rank)
        model.error = None
        with torch.no_grad():
            for param in params:
                param.mul_(2)
        check(model, plain, rank, world_size, step)


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, None])
def test_block_that_is_called_by_itself(rank: int, world_size: int, raf: bool | None) -> None:
    """A loss of its own on one block, which asks the whole model: that took the block's forward for one that raised."""

    def block_alone(model: nn.Module, rank: int) -> None:
        model.blocks[1](batch(1, rank), model).square().mean().backward()

    plain = Asked()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fsdp2.fully_shard(block, reshard_after_forward=raf)
    fsdp2.fully_shard(model)
    step(model, rank)
    check(model, plain, rank, world_size, block_alone)


class Forces(nn.Module):
    """An energy, whose gradient the rest of the forward works with, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.body(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(force)


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, None, False])
def test_a_backward_within_a_forward(rank: int, world_size: int, raf: bool | None) -> None:
    """Its end resharded the root, whose forward went on: "got mixed torch.Tensor and DTensor"."""
    plain = Forces()
    model = copy.deepcopy(plain)
    fsdp2.fully_shard(model.body, reshard_after_forward=raf)
    fsdp2.fully_shard(model, reshard_after_forward=raf)
    check(model, plain, rank, world_size, step, times=2)


# --- shallow copies ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_copy(rank: int, world_size: int) -> None:
    """`copy.copy` gave the error of pickling. The copy is the same unit under a second object, as torch's is."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = shard(copy.deepcopy(plain))
    copied: Any = copy.copy(model)
    assert isinstance(copied, fsdp2.FSDPModule) and isinstance(copied, nn.Sequential)
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    for used in (copied, model, copied):
        check(used, plain, rank, world_size, step)
    del model, used
    check(copied, plain, rank, world_size, step)


@on_ranks(2)
def test_slice(rank: int, world_size: int) -> None:
    """Behaviour 5: a plain Sequential with the same children, as torch's."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = shard(copy.deepcopy(plain))
    model(batch(0, rank))
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0] and type(type(model)(nn.ReLU())) is nn.Sequential
    check(part, plain[:2], rank, world_size, step)


class Tower(nn.Module):
    """Its merger is used within its forward, and is a member of the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.merger, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.merger(torch.tanh(self.inp(x)))))


@on_ranks(2)
def test_a_member_of_a_unit_that_is_called_within_another(rank: int, world_size: int) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), Tower(), nn.Linear(8, 8))
    model: Any = copy.deepcopy(plain)
    fsdp2.fully_shard([model[1], model[1].merger])
    fsdp2.fully_shard(model)
    check(model, plain, rank, world_size, step, times=2)


# --- backwards within backwards ---------------------------------------------------------------------------------------


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


class TiledStack(nn.Module):
    """`checkpointed` checkpoints each block too, around its inner backwards."""

    def __init__(self, how: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.layers: Any = nn.ModuleList(Mlp(how) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def step_of(model: Any, step: int, rank: int) -> Tensor:
    """Rank r has 3 + r tiles."""
    for layer in model.layers:
        layer.num_tiles = 3 + rank
    loss = model(torch.cat([batch(step + index, rank, 4) for index in range(4)])).square().mean()
    loss.backward()
    return loss.detach()


@on_ranks(2)
@pytest.mark.parametrize("how", ["tiled", "hidden", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_training_with_inner_backwards(rank: int, world_size: int, how: str, checkpointed: bool) -> None:
    shard = partial(shard_blocks, reshard_after_forward=True)
    Race(rank, world_size, lambda: TiledStack(how, checkpointed), shard, step_of).run(3)
