"""After an exception in forward or backward: `reset_iter_state`, and the next iteration is exact (Behaviour 178,
179)."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import OrderError, fully_shard
from tests.helpers.models import Dot, add, grads
from tests.helpers.parity_models import Stack, assert_gradients, batch, local, mean_gradients, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks


class Broken(Exception):
    """What the model raises."""


class Fuse(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blows_in: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.blows_in == "forward":
            raise Broken
        x = x.clone()
        if self.blows_in == "backward":
            x.register_hook(self.blow)
        return x

    def blow(self, grad: Tensor) -> None:
        raise Broken


class Fused(Stack):
    """A stack with a fuse in the root, between its blocks, and one inside the second block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fuse = Fuse()
        self.inner_fuse = Fuse()
        self.blocks[1].norm = nn.Sequential(self.blocks[1].norm, self.inner_fuse)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            if i == 1:
                x = self.fuse(x)
        return self.out(x)


def step(model: nn.Module, rank: int) -> None:
    model(batch(0, rank)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
@pytest.mark.parametrize("where", ["fuse", "inner_fuse"])
@pytest.mark.parametrize("blows_in", ["forward", "backward"])
@pytest.mark.parametrize("first", [True, False], ids=["first_iteration", "later"])
def test_next_iteration_is_exact(
    rank: int, world_size: int, raf: bool | None, where: str, blows_in: str, first: bool
) -> None:
    """Behaviour 178: between units and inside one, in forward and in backward, in the first iteration and later."""
    plain = Fused()
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), reshard_after_forward=raf)
    if not first:
        step(model, rank)
    fuse = getattr(model, where)
    fuse.blows_in = blows_in
    with pytest.raises(Broken):
        step(model, rank)
    fuse.blows_in = None
    model.reset_iter_state()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.zero_grad()
    for _ in range(2):
        step(model, rank)
        assert_gradients(model, mean_gradients(plain, world_size, step))
        model.zero_grad()


@on_ranks(2, 4)
@pytest.mark.parametrize("blows_in", ["forward", "backward", "nothing"])
def test_a_model_is_dropped_while_messages_are_under_way(rank: int, world_size: int, blows_in: str) -> None:
    """What was gathered ahead was freed with the model, after an exception or with a handle that nobody waited for.
    gloo cannot withdraw a message: the next collective of the group hung."""
    for _ in range(2):
        model: Any = shard_blocks(fsdp2, Fused())
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1], model.blocks[2]])
        if blows_in == "nothing":
            model.blocks[1].unshard(async_op=True)
        else:
            model.inner_fuse.blows_in = blows_in
            with pytest.raises(Broken):
                step(model, rank)
        del model
        gc.collect()
        dist.barrier()
    plain = Fused()
    model = shard_blocks(fsdp2, copy.deepcopy(plain))
    step(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2)
@pytest.mark.parametrize("with_grad", [False, True], ids=["backward", "autograd.grad"])
def test_another_backward_after_one_that_raised(rank: int, world_size: int, with_grad: bool) -> None:
    """A loss whose forward ran before went backward after another's had raised: units below the fault got no gradient,
    some gradients were not reduced, and a step would have used them. It is an error that says what to call."""
    model: Any = shard_blocks(fsdp2, Fused())
    sound = model(batch(0, rank)).square().sum()
    model.fuse.blows_in = "backward"
    given = batch(1, rank).requires_grad_()
    faulty = model(given).square().sum()
    with pytest.raises(Broken):
        _ = torch.autograd.grad(faulty, given) if with_grad else faulty.backward()
    with pytest.raises(OrderError, match=r"backward was called, but the last.*reset_iter_state"):
        sound.backward()
    model.reset_iter_state()
    model.fuse.blows_in = None
    model.zero_grad()
    step(model, rank)
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(4)
@pytest.mark.parametrize("blows_in", ["forward", "backward"])
def test_hsdp(rank: int, world_size: int, blows_in: str) -> None:
    """Behaviour 178: the same with HSDP, where all-reduces may be under way."""
    plain = Fused()
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh_2d(2, 2))
    model.fuse.blows_in = blows_in
    with pytest.raises(Broken):
        step(model, rank)
    model.fuse.blows_in = None
    model.reset_iter_state()
    model.zero_grad()
    step(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2)
def test_unsynced_gradients_are_dropped(rank: int, world_size: int) -> None:
    """Behaviour 178: what had not been reduced belongs to the lost iteration; sharded gradients stay."""
    model: Any = fully_shard(Dot())
    add(model, 5)
    add(model, 100, sync=False)
    model.reset_iter_state()
    assert grads(model) == [5]
    add(model, 2)
    assert grads(model) == [7]


@on_ranks(4)
def test_partial_gradients_are_dropped(rank: int, world_size: int) -> None:
    """Behaviour 178: so do HSDP's partial gradients."""
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2))
    add(model, 100, all_reduce=False)
    model.reset_iter_state()
    add(model, 2)
    assert grads(model) == [2]


@on_ranks(2)
def test_optimizer_state_is_untouched(rank: int, world_size: int) -> None:
    """Behaviour 178: parameters, as objects and as values, and so the optimizer, survive the reset."""
    model: Any = shard_blocks(fsdp2, Fused())
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, rank)
    optim.step()
    optim.zero_grad()
    params = list(model.parameters())
    values = [local(param.detach()).clone() for param in params]
    model.fuse.blows_in = "backward"
    with pytest.raises(Broken):
        step(model, rank)
    model.reset_iter_state()
    for param, now, value in zip(params, model.parameters(), values, strict=True):
        assert now is param
        assert torch.equal(local(param.detach()), value)


@on_ranks(2)
def test_of_a_non_root(rank: int, world_size: int) -> None:
    """Behaviour 179: a RuntimeError on a child, at no time harmful on a root, even before the first forward."""
    plain = Fused()
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain))
    model.reset_iter_state()
    step(model, rank)
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert_gradients(model, mean_gradients(plain, world_size, step))
    model.zero_grad()
    model.reset_iter_state()
    step(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_exception_in_a_recompute(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 178: an exception in a checkpoint's recompute, inside backward, leaves nothing behind either."""
    plain = Fused(use_reentrant=use_reentrant)
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain))
    for _ in range(2):
        loss = model(batch(0, rank)).square().sum()
        model.inner_fuse.blows_in = "forward"
        with pytest.raises(Broken):
            loss.backward()
        model.inner_fuse.blows_in = None
        model.reset_iter_state()
        model.zero_grad()
        step(model, rank)
        assert_gradients(model, mean_gradients(plain, world_size, step))
