"""A forward within a forward of the same unit: nets that call themselves, adapters that ask the whole model.

The inner call ended the unit's forward, and resharded what the rest of the outer one still needed; that of a root began
a new iteration, which resharded everything.
"""

from __future__ import annotations

import copy
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from tests.helpers.parity_models import Race, assert_gradients, batch, count, mean_gradients, one_batch
from tests.helpers.ranks import on_ranks


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


class Encoding(nn.Module):
    """A method beside forward is an entry point of its own, and forward uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inp(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))


def shard_all(api: ModuleType, model: nn.Module, raf: bool | None) -> None:
    for child in [*getattr(model, "blocks", ()), *(c for c in model.children() if isinstance(c, nn.Linear))]:
        api.fully_shard(child, reshard_after_forward=raf)
    shard_root(api, model, raf)


def shard_root(api: ModuleType, model: nn.Module, raf: bool | None) -> None:
    api.fully_shard(model, reshard_after_forward=raf)
    if isinstance(model, Encoding):
        api.register_fsdp_forward_method(model, "encode")


@on_ranks(2)
@pytest.mark.parametrize("build", [Tree, Asked, Encoding])
@pytest.mark.parametrize("shard", [shard_all, shard_root])
@pytest.mark.parametrize("raf", [True, None])
def test_training(rank: int, world_size: int, build: type, shard: Any, raf: bool | None) -> None:
    """torch's FSDP2 (2.13) can do it where the unit does not reshard after forward."""
    can = raf is None and not (build is Tree and shard is shard_root)
    Race(rank, world_size, build, partial(shard, raf=raf), one_batch, torch=can and build is not Asked).run(3)


@on_ranks(2)
def test_gathers_once(rank: int, world_size: int) -> None:
    """The inner calls find the parameters that the outer one gathered."""
    model = fsdp2.fully_shard(Tree(), reshard_after_forward=True)
    with fsdp2.events.record() as log:
        model(batch(0, rank)).sum().backward()
    kinds = ("unshard", "reduce_scatter", "root_pre_forward")
    assert count(log, *kinds) == {"unshard": 2, "reduce_scatter": 1, "root_pre_forward": 1}


@on_ranks(2)
def test_after_an_exception_within(rank: int, world_size: int) -> None:
    """A forward that raised three calls deep is not taken for one that the next is within."""

    class Picky(Tree):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if depth == 0 and x.max() > 100:
                raise ValueError("too large")
            return super().forward(x, depth)

    plain = Picky()
    model = copy.deepcopy(plain)
    shard_all(fsdp2, model, True)
    for _ in range(2):
        with pytest.raises(ValueError, match="too large"):
            model(batch(0, rank) + 1000)
        with torch.no_grad():
            for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
                param.mul_(2)
                sharded.mul_(2)
        model.zero_grad()
        one_batch(model, 0, rank)
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r: one_batch(m, 0, r)))


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, None])
def test_block_that_is_called_by_itself(rank: int, world_size: int, raf: bool | None) -> None:
    """A loss of its own on one block, which asks the whole model. The model's forward took the block's for one that
    had raised, and resharded what the rest of it needs: "got mixed torch.Tensor and DTensor"."""

    def block_alone(model: nn.Module, rank: int) -> None:
        model.blocks[1](batch(1, rank), model).square().mean().backward()

    plain = Asked()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fsdp2.fully_shard(block, reshard_after_forward=raf)
    fsdp2.fully_shard(model)
    one_batch(model, 0, rank)
    model.zero_grad()
    block_alone(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, block_alone))


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
    for _ in range(2):
        model.zero_grad()
        one_batch(model, 0, rank)
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r: one_batch(m, 0, r)))


# --- shallow copies ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_copy(rank: int, world_size: int) -> None:
    """`copy.copy` gave the error of pickling. The copy is the same unit under a second object, as torch's is."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model: Any = copy.deepcopy(plain)
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    copied: Any = copy.copy(model)
    assert isinstance(copied, fsdp2.FSDPModule) and isinstance(copied, nn.Sequential)
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    expected = mean_gradients(plain, world_size, lambda m, r: one_batch(m, 0, r))
    for used in (copied, model, copied):
        used.zero_grad()
        one_batch(used, 0, rank)
        assert_gradients(model, expected)
    del model, used
    copied.zero_grad()
    one_batch(copied, 0, rank)
    assert_gradients(copied, expected)


@on_ranks(2)
def test_slice(rank: int, world_size: int) -> None:
    """A plain Sequential with the same children, as torch's."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model: Any = copy.deepcopy(plain)
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    model(batch(0, rank))
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0]
    part(batch(0, rank)).sum().backward()
    expected = mean_gradients(plain[:2], world_size, lambda m, r: m(batch(0, r)).sum().backward())
    assert_gradients(part, expected)


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
    for _ in range(2):
        model.zero_grad()
        one_batch(model, 0, rank)
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r: one_batch(m, 0, r)))


@on_ranks(2)
def test_a_step_after_an_interrupt(rank: int, world_size: int) -> None:
    """torch calls no hooks after a KeyboardInterrupt: the next forward is no call within the one that is gone."""

    class Interrupted(nn.Linear):
        interrupts = False

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupts:
                raise KeyboardInterrupt
            return super().forward(x)

    plain = nn.Sequential(nn.Linear(8, 8), Interrupted(8, 8), nn.Linear(8, 8))
    model: Any = copy.deepcopy(plain)
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    params = [*plain.parameters(), *model.parameters()]  # as an optimizer holds them
    for _ in range(2):
        Interrupted.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            one_batch(model, 0, rank)
        Interrupted.interrupts = False
        with torch.no_grad():
            for param in params:
                param.mul_(0.5)
        model.zero_grad()
        one_batch(model, 0, rank)
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r: one_batch(m, 0, r)))
