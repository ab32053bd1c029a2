"""`torch.func` around a sharded model, for losses that hold a derivative of the model itself (MeanFlow, PINNs)."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import fsdp2
from fsdp2 import ArgumentError, fully_shard
from tests.helpers.parity_models import TORCH_VERSION, Race, batch
from tests.helpers.ranks import on_ranks


class Velocity(nn.Module):
    """A body of blocks with a unit within each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block(x)
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


def vmap_of_grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(x).square().mean()


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Without torch.func."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


LOSSES: list[Callable[[nn.Module, Tensor], Tensor]] = [mean_flow, jvp, vjp, vmap_of_grad, gradient_penalty]
# torch's FSDP2 (2.13) finds parameters without memory in a backward through a backward.
TORCH_CAN = [mean_flow, jvp]


@on_ranks(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_always", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_training(rank: int, world_size: int, loss: Callable[[nn.Module, Tensor], Tensor], is_always: bool) -> None:
    """Whether all forwards are within the transform, or not the first one; every weight is trained."""

    def backward(model: nn.Module, step: int, rank: int) -> Tensor:
        value = (loss if is_always or step else plain)(model, batch(step, rank, 4).requires_grad_(step == 1))
        value.backward()
        return value.detach()

    can = loss in TORCH_CAN and TORCH_VERSION >= (2, 13)
    Race(rank, world_size, Velocity, shard, backward, torch=can).run(3)


@on_ranks(2)
@pytest.mark.parametrize("loss", [vmap_of_grad, jvp])
def test_frozen_since_forward(rank: int, world_size: int, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """The unsharded parameter follows that within a transform, where torch refuses `requires_grad_`."""
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
    """The copy in a smaller group is a parameter that is made within the transform, which calls `requires_grad_`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(model[0], reshard_after_forward=2)
    fsdp2.fully_shard(model, reshard_after_forward=2)
    for loss in (vmap_of_grad, jvp):
        loss(model, batch(0, rank, 4)).backward()
    assert all(param.grad is not None for param in model.parameters())


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


# --- `functional_call`, and whoever else puts something in the place of sharded parameters ----------------------------


X = torch.ones(1, 4)


def make(shard: Callable[..., Any] | None, **options: Any) -> Any:
    """Two layers, each a unit, which ran once: a first forward takes up whatever the modules hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard is not None:
        shard(model[0], **options)
        shard(model, **options)
    model(X)
    return model


def zeros(model: nn.Module, kind: str) -> Tensor:
    return torch.zeros_like(model.get_parameter("0.weight")) if kind == "sharded" else torch.zeros(4, 4)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_other_parameters_are_not_passed_over(rank: int, world_size: int, kind: str) -> None:
    """torch still takes the unit's own parameters; when this fails it does not, and our error may go."""
    plain, theirs, ours = (make(shard) for shard in (None, torch.distributed.fsdp.fully_shard, fully_shard))
    expected = functional_call(plain, {"0.weight": torch.zeros(4, 4)}, (X,))
    assert not torch.equal(expected, plain(X))
    assert torch.equal(functional_call(theirs, {"0.weight": zeros(theirs, kind)}, (X,)), plain(X))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'0\.weight' is sharded, and its module holds a D?Tensor"):
            functional_call(ours, {"0.weight": zeros(ours, kind)}, (X,))
        ours.reset_iter_state()
        assert torch.equal(ours(X), plain(X))


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}], ids=str)
def test_its_own_parameters(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Those of `named_parameters`, also detached, are what it computes with anyway; buffers are taken as they come."""
    model = make(fully_shard, **options)
    expected = model(X)
    assert torch.equal(functional_call(model, dict(model.named_parameters()), (X,)), expected)
    for unit in (model, model[0]):
        unit.reshard()
    own = {name: param.detach() for name, param in model.named_parameters()}
    assert torch.equal(functional_call(model, own, (X,)), expected)
    model.reset_iter_state()  # the root stays unsharded, and functional_call puts sharded parameters back
    model(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
