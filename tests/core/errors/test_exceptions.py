"""After an exception: `reset_iter_state`, and the next iteration is exact (Behaviour 178, 179)."""

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import OrderError, fully_shard
from fsdp2.runtime.gather import Gather
from tests.helpers.models import Dot, add, grads
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import Stack, assert_gradients, batch, mean_gradients
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import assert_same_gradients, backward_of, sharded_layers, two_layers


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
            x = self.fuse(x) if i == 1 else x
        return self.out(x)


def step(model: nn.Module, rank: int) -> None:
    model(batch(0, rank)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize(("raf", "first"), [(True, True), (False, True), (None, False)])
@pytest.mark.parametrize("where", ["fuse", "inner_fuse"])
@pytest.mark.parametrize("blows_in", ["forward", "backward"])
def test_next_iteration_is_exact(
    rank: int, world_size: int, raf: bool | None, where: str, blows_in: str, first: bool
) -> None:
    """Behaviour 178: between units and inside one, in forward and in backward, in the first iteration and later."""
    plain = Fused()
    model = in_units(plain, reshard_after_forward=raf)
    if not first:
        step(model, rank)
    fuse = getattr(model, where)
    fuse.blows_in = blows_in
    with pytest.raises(Broken):
        step(model, rank)
    fuse.blows_in = None
    model.reset_iter_state()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    check(model, plain, rank, world_size, step, times=2)


@on_ranks(2, 4)
@pytest.mark.parametrize("blows_in", ["forward", "backward", "nothing"])
def test_a_model_is_dropped_while_messages_are_under_way(rank: int, world_size: int, blows_in: str) -> None:
    """gloo cannot withdraw a message: the next collective of the group hung."""
    for _ in range(2):
        model = in_units(Fused())
        model.set_modules_to_forward_prefetch([*model.blocks])
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
    check(in_units(plain), plain, rank, world_size, step)


@on_ranks(2)
def test_the_next_gather_waits_for_what_a_dropped_model_was_sent(rank: int, world_size: int) -> None:
    """The other rank has not begun to send yet. A receive that is freed before its message comes blocks those after."""
    plain = Fused()
    dropped, model = in_units(plain), in_units(plain)
    dist.barrier()
    time.sleep(0.3 * rank)
    dropped.blocks[1].unshard(async_op=True)
    del dropped
    gc.collect()
    check(model, plain, rank, world_size, step)


@on_ranks(2)
@pytest.mark.parametrize("with_grad", [False, True], ids=["backward", "autograd.grad"])
def test_another_backward_after_one_that_raised(rank: int, world_size: int, with_grad: bool) -> None:
    """Units below the fault got no gradient, and some were not reduced: an error that says what to call."""
    plain = Fused()
    model = in_units(plain)
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
    check(model, plain, rank, world_size, step)


@on_ranks(2)
def test_an_error_at_the_end_of_backward(rank: int, world_size: int) -> None:
    """A program that skipped the batch without a word to fsdp2 got its other gradients in the next step, twice."""
    plain = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    model = in_units(plain)
    model.set_reduce_scatter_max_input_buffers(3)
    is_odd = [True]

    def refuse(param: Tensor) -> None:
        if is_odd.pop():
            raise Broken

    model[2].weight.register_post_accumulate_grad_hook(refuse)
    with pytest.raises(Broken):
        step(model, rank)
    model.zero_grad()
    with pytest.raises(OrderError, match=r"forward was called, but the last.*reset_iter_state"):
        model(batch(1, rank))
    model.reset_iter_state()
    is_odd.append(False)
    check(model, plain, rank, world_size, step)


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


@on_ranks(2)
def test_of_a_non_root(rank: int, world_size: int) -> None:
    """Behaviour 179: a RuntimeError on a child, at no time harmful on a root, even before the first forward."""
    plain = Fused()
    model = in_units(plain)
    model.reset_iter_state()
    check(model, plain, rank, world_size, step)
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert_gradients(model, mean_gradients(plain, world_size, step))


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_exception_in_a_recompute(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 178: an exception in a checkpoint's recompute, inside backward, leaves nothing behind either."""
    plain = Fused(use_reentrant=use_reentrant)
    model = in_units(plain)
    for _ in range(2):
        loss = model(batch(0, rank)).square().sum()
        model.inner_fuse.blows_in = "forward"
        with pytest.raises(Broken):
            loss.backward()
        model.inner_fuse.blows_in = None
        model.reset_iter_state()
        check(model, plain, rank, world_size, step)


@on_ranks(2)
def test_backward_that_failed_above_the_root_went_unnoticed(rank: int, world_size: int) -> None:
    """The failed one's gradients came out of the next backward."""
    model = fully_shard(nn.Linear(4, 4))
    given = 100 * torch.ones(2, 4, requires_grad=True)
    given.register_hook(Fuse().blow)
    with pytest.raises(Broken):
        model(given).sum().backward()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
@pytest.mark.parametrize("nth", [1, 3])
def test_reset_after_an_unshard_that_failed(
    rank: int, world_size: int, nth: int, reshard_after_forward: bool | int
) -> None:
    """docs/design.md, invariant 7: out of memory, or an extension that raises, in forward and in backward."""
    model = sharded_layers(reshard_after_forward=reshard_after_forward)
    backward_of(model)
    original, calls = Gather._finish, []

    def failing(self: Gather, *args: Any) -> None:
        original(self, *args)
        calls.append(self)
        if len(calls) == nth:
            raise torch.OutOfMemoryError("on every rank")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Gather, "_finish", failing)
        with pytest.raises(torch.OutOfMemoryError):
            backward_of(model)
        model.reset_iter_state()
        assert all(param.device_mesh.ndim == 1 for param in model.parameters())
        model.zero_grad()
    plain = two_layers()
    with torch.no_grad():  # rows on the smaller mesh were gathered in place of new weights
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(3)
    for each in (model, plain):
        backward_of(each)
    assert_same_gradients(model, plain)
