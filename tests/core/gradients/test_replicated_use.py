"""Replicated parameters are used as they are: they must not change between forward and backward, and may elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import OrderError, ZeroPolicy, fully_shard
from tests.helpers.parity_models import batch, local
from tests.helpers.ranks import on_ranks

KINDS = ["stage0", "scalar"]


class Block(nn.Module):
    """A matrix, and a scalar, which is replicated also under FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale


class Routed(nn.Module):
    """Runs the blocks that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x


def routed(kind: str, **options: Any) -> Any:
    model = Routed()
    options |= {"zero": ZeroPolicy(stage=0)} if kind == "stage0" else {}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: Any, optimizer: Any, rank: int, *routes: tuple[int, ...]) -> None:
    for number, route in enumerate(routes):
        model(batch(number, rank, 4), route).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explicit", [True, False])
def test_prefetched_without_a_forward(rank: int, world_size: int, kind: str, explicit: bool) -> None:
    """A block that was left out of a step, whose backward prefetched it: "changed between forward and backward"."""
    model = routed(kind)
    sharded = [block.linear.weight for block in model.blocks]
    if explicit:
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, rank, (0, 1, 2))
    before = local(sharded[1].detach()).clone()
    if explicit:
        train(model, optimizer, rank, (0, 2), (2,), (0, 2))
    else:
        output = model(batch(1, rank, 4), (0, 2))
        output.register_hook(lambda _: model.blocks[1].unshard())
        output.square().sum().backward()
        optimizer.step()
    assert torch.equal(local(sharded[1].detach()), before)
    train(model, optimizer, rank, (0, 1, 2))
    assert not torch.equal(local(sharded[1].detach()), before)


class InBackward(torch.autograd.Function):
    """Computes a module's forward and backward in its own backward, as layers do that are tiled over the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_comes_in_backward(rank: int, world_size: int, kind: str) -> None:
    """A block that runs first in a backward uses the values of now, whatever those of the last step were."""
    model = routed(kind)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model.blocks[0](InBackward.apply(self.model.blocks[1](x), self.model.blocks[2]))

    outer: Any = fully_shard(Outer())
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    for step in range(3):
        outer(batch(step, rank, 4).requires_grad_()).sum().backward()
        optimizer.step()


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_between_forward_and_backward(rank: int, world_size: int, kind: str) -> None:
    """A step before a backward, between two, or before a second one of one graph; and other values, assigned."""
    for pattern in ("once", "two_forwards", "retained", "assigned"):
        changed_between(routed(kind), rank, pattern)


def changed_between(model: Any, rank: int, pattern: str) -> None:
    params = list(model.parameters())
    is_second = pattern in ("two_forwards", "retained")
    losses = [model(batch(number, rank, 4), (0, 1, 2)).square().sum() for number in range(1 + is_second)]
    if is_second:
        losses[0].backward(retain_graph=pattern == "retained")
    if pattern == "assigned":
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    else:
        with torch.no_grad():
            for param in params:
                param.add_(1)
    with pytest.raises(OrderError, match="between forward and backward"):
        losses[0 if pattern == "retained" else -1].backward()
    model.reset_iter_state()


MOVES: dict[str, Callable[[Any], object]] = {
    "another dtype": lambda model: model.to(torch.float64),
    "there and back": lambda model: model.to(torch.float64).to(torch.float32),
    "one block": lambda model: model.blocks[1].to(torch.float64).to(torch.float32),
    "other memory": lambda model: model._apply(torch.clone),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_converted_between_forward_and_backward(rank: int, world_size: int, kind: str, move: str) -> None:
    """The graph holds parameters that the model has no more: lost gradients, or a segmentation fault."""
    model = routed(kind)
    loss = model(batch(0, rank, 4), (0, 1, 2)).square().sum()
    MOVES[move](model)
    with pytest.raises(OrderError, match=r"converted between forward and backward"):
        loss.backward()
    model.reset_iter_state()
    dtype = next(model.parameters()).dtype
    model(batch(0, rank, 4).to(dtype), (0, 1, 2)).square().sum().backward()
    assert model.blocks[0].scale.grad.dtype == dtype
