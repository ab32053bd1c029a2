"""Gradients that the model writes or changes itself: backwards that set `weight.grad`, hooks on unsharded weights.

Autograd tells of neither. A weight whose backward was its own got no gradient at all, silently; and a model's hook ran
after the reduction had taken the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.parity_models import Race, batch, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks

RARE = pytest.mark.exhaustive


class FusedProduct(torch.autograd.Function):
    """``x @ weight.T`` whose backward adds to `weight.grad`, as Megatron's and Transformer Engine's do. The weight is
    an input, or comes with its `module`, so that autograd knows nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, module: Any, in_place: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.in_place = module.weight, in_place
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        new = grad.t() @ x
        if weight.grad is None:
            weight.grad = new
        elif ctx.in_place:
            weight.grad.add_(new)
        else:
            weight.grad = weight.grad + new
        return grad @ weight, None, None, None


class FusedLinear(nn.Module):
    def __init__(self, dim: int, hidden: bool, in_place: bool, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / 2)
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.hidden, self.in_place = hidden, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = FusedProduct.apply(x, None if self.hidden else self.weight, self, self.in_place)
        return torch.tanh(x if self.bias is None else x + self.bias)


class FusedStack(nn.Module):
    def __init__(self, depth: int = 3, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(FusedLinear(4, **options) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
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
@pytest.mark.parametrize("raf", [True, pytest.param(False, marks=RARE)])
@pytest.mark.parametrize("bias", [False, True], ids=["alone", "with_bias"])
@pytest.mark.parametrize("hidden", [True, pytest.param(False, marks=RARE)], ids=["hidden", "input"])
@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=RARE)], ids=["adds", "sets"])
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=RARE)], ids=["plain", "checkpointed"])
def test_written_by_a_backward(
    rank: int,
    world_size: int,
    backward: Callable[[nn.Module, int, int], Tensor],
    raf: bool,
    bias: bool,
    hidden: bool,
    in_place: bool,
    checkpointed: bool,
) -> None:
    """What backward leaves in `.grad` of unsharded parameters is reduced, at the end of their unit at the latest."""
    Race(
        rank,
        world_size,
        lambda: FusedStack(checkpointed=checkpointed, hidden=hidden, in_place=in_place, bias=bias),
        lambda api, model: shard_blocks(api, model, reshard_after_forward=raf),
        backward,
    ).run(3)


@on_ranks(2)
def test_reduced_at_the_end_of_the_unit(rank: int, world_size: int) -> None:
    """Not only at the end of the whole backward: memory of gradients stays that of a unit or two."""
    model = shard_blocks(fsdp2, FusedStack(hidden=True, in_place=True, bias=False))
    with fsdp2.events.record() as log:
        in_one(model, 0, rank)
    kinds = [
        f"{event.kind} {event.unit}" for event in log if event.unit and event.kind in ("pre_backward", "reduce_scatter")
    ]
    assert kinds == [f"{kind} layers.{index}" for index in (2, 1, 0) for kind in ("pre_backward", "reduce_scatter")]


# --- hooks ------------------------------------------------------------------------------------------------------------


class Halved(nn.Linear):
    """Hooks its weights in forward, those of a sharded model thus while they are unsharded."""

    def __init__(self, dim: int, how: str, bias: bool) -> None:
        super().__init__(dim, dim, bias=bias)
        self.how = how
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if torch.is_grad_enabled():
            for param in (self.weight, *(() if self.bias is None else (self.bias,))):
                if self.how == "after":
                    self.handles.append(param.register_post_accumulate_grad_hook(halve_gradient))
                elif self.how == "replaces":
                    self.handles.append(param.register_post_accumulate_grad_hook(replace_gradient))
                else:
                    self.handles.append(param.register_hook(lambda grad: grad * 0.5))
        return super().forward(x)


def halve_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


class HalvedStack(nn.Module):
    def __init__(self, how: str, bias: bool, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inp = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Halved(8, how, bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@on_ranks(2)
@pytest.mark.parametrize("how", ["after", "replaces", "before"])
@pytest.mark.parametrize("bias", [False, True], ids=["alone", "with_bias"])
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_hooks_on_unsharded_weights(
    rank: int, world_size: int, how: str, bias: bool, use_reentrant: bool | None
) -> None:
    """Hooks act on this rank's gradient, before it is reduced."""
    Race(rank, world_size, lambda: HalvedStack(how, bias, use_reentrant), shard_blocks, one_batch).run(3)


@on_ranks(2)
def test_a_hook_on_one_rank(rank: int, world_size: int) -> None:
    """Rank 0 looks at its gradients. All ranks reduce in the same order still."""
    logs, seen = [], []
    model: Any = shard_blocks(fsdp2, HalvedStack("before", True, None))
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
    assert logs[0] == logs[1]
    assert len(seen) == (3 if rank == 0 else 0)


class CastProduct(torch.autograd.Function):
    """The same in bf16; on request the gradient is in the dtype that the weight asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, casts: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.casts = weight, casts
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        new = grad.t() @ x
        new = new.to(weight.grad_dtype) if ctx.casts else new
        weight.grad = new if weight.grad is None else weight.grad + new
        return grad @ weight, None, None


class CastLinear(nn.Module):
    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        return CastProduct.apply(x, self.weight, self.casts)


@on_ranks(2)
@pytest.mark.parametrize("casts", [True, False], ids=["casts", "any"])
def test_written_in_another_dtype(rank: int, world_size: int, casts: bool) -> None:
    """Gradients wait in the reduce dtype, which is the weight's `grad_dtype` (as in torch 2.15; torch 2.13 keeps them
    in the compute dtype and takes any). What docs/troubleshooting.md says works: to cast, or to set `grad_dtype` to
    None; and microbatches add up in fp32."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wrong: Any = fsdp2.fully_shard(CastLinear(casts=False), mp_policy=policy)
    with pytest.raises(RuntimeError, match="grad_dtype"):
        wrong(torch.ones(1, 4, requires_grad=True)).sum().backward()
    wrong.reset_iter_state()
    model: Any = fsdp2.fully_shard(CastLinear(casts), mp_policy=policy)
    model.weight.grad_dtype = torch.float32 if casts else None
    for value, syncs in ((256.0, False), (1.0, True)):
        model.set_requires_gradient_sync(syncs)
        model(torch.full((1, 4), value, requires_grad=True)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 257.0))
