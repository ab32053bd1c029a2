"""Gradients that the model writes or changes itself: backwards that set `weight.grad`, hooks on unsharded weights."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.parity_models import Layers, Race, batch, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks


class FusedProduct(torch.autograd.Function):
    """Adds to `weight.grad`, as Megatron's. The weight is an input, or comes with its `module`, unknown to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, module: Any, in_place: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.in_place, ctx.casts = module.weight, in_place, module.casts
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        new = grad.t() @ x
        new = new.to(weight.grad_dtype) if ctx.casts else new
        if weight.grad is None:
            weight.grad = new
        elif ctx.in_place:
            weight.grad.add_(new)
        else:
            weight.grad = weight.grad + new
        return grad @ weight, None, None, None


class FusedLinear(nn.Module):
    casts = False

    def __init__(self, dim: int, hidden: bool, in_place: bool, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / 2)
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.hidden, self.in_place = hidden, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = FusedProduct.apply(x, None if self.hidden else self.weight, self, self.in_place)
        return x if self.bias is None else x + self.bias


class FusedStack(nn.Module):
    def __init__(self, depth: int = 3, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(FusedLinear(4, **options) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def loss_of(model: nn.Module, *seeds: int, rank: int) -> Tensor:
    inputs = [batch(seed, rank, 4).requires_grad_() for seed in seeds]
    return torch.stack([model(x).square().mean() for x in inputs]).sum()


def in_one(model: Any, step: int, rank: int) -> Tensor:
    loss = loss_of(model, step, rank=rank)
    loss.backward()
    return loss.detach()


def used_twice(model: Any, step: int, rank: int) -> Tensor:
    loss = loss_of(model, step, step + 50, rank=rank)
    loss.backward()
    return loss.detach()


def accumulated(model: Any, step: int, rank: int) -> Tensor:
    losses = []
    for index in range(2):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == 1)
        losses.append(loss_of(model, 2 * step + index, rank=rank))
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


@on_ranks(2)
@pytest.mark.parametrize("backward", [in_one, used_twice, accumulated])
@pytest.mark.parametrize(
    "options",
    [
        {"hidden": True, "in_place": True},
        {"hidden": False, "in_place": True},
        {"hidden": True, "in_place": False, "bias": True},
        {"hidden": True, "in_place": True, "bias": True, "checkpointed": True},
    ],
    ids=str,
)
def test_written_by_a_backward(rank: int, world_size: int, backward: Any, options: dict[str, bool]) -> None:
    """What backward leaves in `.grad` of unsharded parameters is reduced, at the end of their unit at the latest."""
    shard = partial(shard_blocks, reshard_after_forward=True)
    Race(rank, world_size, lambda: FusedStack(**options), shard, backward).run(3)


@on_ranks(2)
def test_reduced_at_the_end_of_the_unit(rank: int, world_size: int) -> None:
    """Not only at the end of the whole backward: memory of gradients stays that of a unit or two."""
    model = shard_blocks(fsdp2, FusedStack(hidden=True, in_place=True))
    with fsdp2.events.record() as log:
        in_one(model, 0, rank)
    kinds = ("pre_backward", "reduce_scatter")
    found = [(event.kind, event.unit) for event in log if event.unit and event.kind in kinds]
    assert found == [(kind, f"layers.{index}") for index in (2, 1, 0) for kind in kinds]


# --- hooks ------------------------------------------------------------------------------------------------------------


def halve_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


class Halved(nn.Linear):
    """Hooks its weights in forward, those of a sharded model thus while they are unsharded."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        while self.handles:
            self.handles.pop().remove()
        for param in (self.weight, self.bias) if torch.is_grad_enabled() else ():
            if self.how == "before":
                self.handles.append(param.register_hook(lambda grad: grad * 0.5))
            else:
                hook = halve_gradient if self.how == "after" else replace_gradient
                self.handles.append(param.register_post_accumulate_grad_hook(hook))
        return super().forward(x)


def halved_stack(how: str, use_reentrant: bool | None = None) -> Any:
    model: Any = Layers(dim=8, use_reentrant=use_reentrant)
    model.layers = nn.ModuleList(Halved(how) for _ in range(3))
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["after", "replaces", "before"])
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_hooks_on_unsharded_weights(rank: int, world_size: int, how: str, use_reentrant: bool | None) -> None:
    """Hooks act on this rank's gradient, before it is reduced."""
    Race(rank, world_size, lambda: halved_stack(how, use_reentrant), shard_blocks, one_batch).run(3)


@on_ranks(2)
def test_a_hook_on_one_rank(rank: int, world_size: int) -> None:
    """Rank 0 looks at its gradients. All ranks reduce in the same order still."""
    logs, seen = [], []
    model: Any = shard_blocks(fsdp2, halved_stack("before"))
    for _ in range(2):
        out = model(batch(0, rank))
        layer = model.layers[1]
        layer.unshard()
        if rank == 0:
            layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
        layer.reshard()
        with fsdp2.events.record() as log:
            out.sum().backward()
        logs.append([f"{event.kind} {event.unit}" for event in log])
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, logs)
    assert everyone[0] == everyone[1]
    assert len(seen) == (3 if rank == 0 else 0)


@on_ranks(2)
@pytest.mark.parametrize("casts", [True, False], ids=["casts", "any"])
def test_written_in_another_dtype(rank: int, world_size: int, casts: bool) -> None:
    """docs/troubleshooting.md: cast to the weight's `grad_dtype`, or set that to None; microbatches add up in fp32."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wrong, model = (fsdp2.fully_shard(FusedLinear(4, False, False), mp_policy=policy) for _ in range(2))
    with pytest.raises(RuntimeError, match="grad_dtype"):
        wrong(torch.ones(1, 4, requires_grad=True)).sum().backward()
    wrong.reset_iter_state()
    model.casts = casts
    model.weight.grad_dtype = torch.float32 if casts else None
    for value, syncs in ((256.0, False), (1.0, True)):
        model.set_requires_gradient_sync(syncs)
        model(torch.full((1, 4), value, requires_grad=True)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 257.0))
