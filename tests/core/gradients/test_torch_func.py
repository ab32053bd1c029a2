"""`torch.func` around a sharded model: losses that hold a derivative of the model itself (MeanFlow, PINNs, influence).

A loop that called a unit only within a transform trained nothing of it, silently: its unsharded parameters were made
within the transform, and were dead after it. Others ended in "element 0 of tensors does not require grad", or in
parameters that backward found without memory, since only the uppermost level had the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.parity_models import TORCH_VERSION, Race, batch, full
from tests.helpers.ranks import on_ranks


class Velocity(nn.Module):
    """A body of blocks with a unit within each, and a head. `use_reentrant` not None checkpoints each block."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            more = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            x = x + more
        return self.head(x)


def shard(api: ModuleType, model: Any) -> None:
    for block in model.body:
        api.fully_shard(block[2])
        api.fully_shard(block)
    api.fully_shard(model.head)
    api.fully_shard(model)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def mean_flow(model: nn.Module, x: Tensor) -> Tensor:
    out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return (out - tangent.detach()).square().mean()


def jvp(model: nn.Module, x: Tensor) -> Tensor:
    out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return (out - tangent).square().mean()


def vjp(model: nn.Module, x: Tensor) -> Tensor:
    out, pull = torch.func.vjp(model, x)
    return (out + pull(torch.ones_like(out))[0]).square().mean()


def grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).square().sum())(x).square().mean()


def jacrev(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda x: model(x).sum(0))(x).square().mean()


def jacfwd(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacfwd(lambda x: model(x).sum(0))(x).square().mean()


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.hessian(lambda x: model(x).square().sum())(x[0]).square().mean()


def vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x).square().mean()


def vmap_of_grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(x).square().mean()


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Without torch.func."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


LOSSES: list[Callable[[nn.Module, Tensor], Tensor]] = [
    mean_flow, jvp, vjp, grad, jacrev, jacfwd, hessian, vmap, vmap_of_grad, gradient_penalty
]  # fmt: skip
RARE = pytest.mark.exhaustive
# torch's FSDP2 (2.13) finds parameters without memory in a backward through a backward.
TORCH_CAN = [mean_flow, jvp, jacfwd, vmap]


@on_ranks(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("when", ["always", *(pytest.param(when, marks=RARE) for when in ("first", "later"))])
@pytest.mark.parametrize("input_grad", [False, pytest.param(True, marks=RARE)], ids=["data", "trained_input"])
def test_training(
    rank: int, world_size: int, loss: Callable[[nn.Module, Tensor], Tensor], when: str, input_grad: bool
) -> None:
    """Whether the first forward is within the transform, a later one, or all of them; every weight is trained."""

    def backward(model: nn.Module, step: int, rank: int) -> Tensor:
        transformed = when == "always" or (when == "first") == (step == 0)
        value = (loss if transformed else plain)(model, batch(step, rank, 4).requires_grad_(input_grad))
        value.backward()
        return value.detach()

    before = Velocity()
    race = Race(rank, world_size, lambda: before, shard, backward, torch=loss in TORCH_CAN and TORCH_VERSION >= (2, 13))
    start = {name: param.detach().clone() for name, param in before.named_parameters()}
    for name, param in race.run(3).named_parameters():
        whole = full(param)
        if "bias" not in name:
            assert not torch.equal(whole, start[name]), f"{name} was not trained"


@on_ranks(2)
def test_backward_that_does_not_reshard(rank: int, world_size: int) -> None:
    """`set_reshard_after_backward(False)`: gradients are reduced, although the module holds the unsharded parameters
    until `reshard` (torch's FSDP2 (2.13) leaves them unreduced, and `reshard` forgets them)."""

    def backward(model: Any, step: int, rank: int) -> Tensor:
        is_sharded = isinstance(model, fsdp2.FSDPModule)
        if is_sharded:
            model.set_reshard_after_backward(False)
        value = vjp(model, batch(step, rank, 4))
        value.backward()
        for module in model.modules() if is_sharded else ():
            if isinstance(module, fsdp2.FSDPModule):
                module.reshard()
        return value.detach()

    Race(rank, world_size, Velocity, shard, backward, torch=False).run(3)


@on_ranks(2)
@pytest.mark.parametrize("loss", [vmap, jvp, jacrev])
def test_frozen_since_forward(rank: int, world_size: int, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """A block is frozen, or unfrozen, before a unit is gathered within a transform. What follows that in the unsharded
    parameter was `requires_grad_`, which torch refuses there."""
    torch.manual_seed(0)
    model = Velocity()
    shard(fsdp2, model)
    model.body[0].requires_grad_(False)
    loss(model, batch(0, rank, 4)).backward()
    value = loss(model, batch(1, rank, 4))
    model.body[0].requires_grad_(True)
    model.body[1].requires_grad_(False)
    value.backward()
    model.zero_grad()
    loss(model, batch(2, rank, 4)).backward()
    assert all(param.grad is not None for param in model.body[0].parameters())
    assert all(param.grad is None for param in model.body[1].parameters())


@on_ranks(4)
def test_smaller_group(rank: int, world_size: int) -> None:
    """The copy that a unit keeps in a smaller group is made within the transform: an `nn.Parameter` of a DTensor, whose
    constructor calls `requires_grad_`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(model[0], reshard_after_forward=2)
    fsdp2.fully_shard(model, reshard_after_forward=2)
    for loss in (vmap, jvp, jacrev):
        loss(model, batch(0, rank, 4)).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_checkpointed(rank: int, world_size: int) -> None:
    """Blocks that are recomputed in the backward of a transform, and in the backward through it."""

    def backward(model: nn.Module, step: int, rank: int) -> Tensor:
        value = gradient_penalty(model, batch(step, rank, 4))
        value.backward()
        return value.detach()

    Race(rank, world_size, lambda: Velocity(use_reentrant=False), shard, backward, torch=False).run(3)


@on_ranks(2)
def test_gathers(rank: int, world_size: int) -> None:
    """The transform adds no collective to those of a plain step."""
    counts = []
    for loss in (plain, mean_flow):
        model: Any = Velocity()
        shard(fsdp2, model)
        with fsdp2.events.record() as log:
            loss(model, batch(0, rank, 4)).backward()
        counts.append([event.kind for event in log].count("reduce_scatter"))
        assert all(isinstance(param, torch.distributed.tensor.DTensor) for param in model.parameters())
    assert counts[0] == counts[1]


@on_ranks(2)
def test_forward_mode_without_transforms(rank: int, world_size: int) -> None:
    """`torch.autograd.forward_ad`: torch asked our function for a `jvp` (torch's FSDP2 (2.13) fails too)."""

    def backward(model: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank, 4).requires_grad_()
        with forward_ad.dual_level():
            out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            value = (out - tangent).square().mean()
        value.backward()
        return value.detach()

    Race(rank, world_size, Velocity, shard, backward, torch=False).run(3)
