"""Where a unit's backward begins and ends under `torch.func` and in forward-mode AD. Layer: extras.

Under a transform a tensor is a stack of tensors, one for each transform, and `requires_grad` refers only to the
uppermost; in forward mode a tensor has a tangent with a separate graph. So instead of hooks, as in `runtime.autograd`,
autograd functions are used here, which torch applies to every tensor at every level.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2.runtime import hooks
from fsdp2.runtime.autograd import on_backward_begin, on_backward_end
from fsdp2.runtime.tree import map_tensors, tensors_in

Callback = Callable[..., None]


class _BackwardEnd(torch.autograd.Function):
    """Identity whose backward calls `end`; a backward through that backward first calls `begin`. A call costs four
    times as much in this form, which torch.func requires."""

    generate_vmap_rule = True

    @staticmethod
    def forward(end: Callback, begin: Callback, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.end, ctx.begin = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.end()
        if torch.is_grad_enabled():
            grads = on_backward_begin(ctx.begin, grads)
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, _end: None, _begin: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # These nodes are recorded before the unit computes anything from the tangents, so their backward runs last.
        # Autograd requires a result that is not the same object as the argument.
        views = tuple(tangent.view_as(tangent) for tangent in tangents)
        return on_backward_end(ctx.end, ctx.begin, views, {})[0]


class _BackwardBegin(torch.autograd.Function):
    """Identity whose backward calls `begin` first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(begin: Callback, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.begin = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.begin()
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _begin: None, tangent: Any) -> Any:
        return on_backward_begin(ctx.begin, tangent)


def _on_end(
    end: Callback, begin: Callback, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """As `runtime.autograd.on_backward_end`; the third result is False."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if _is_differentiable(tensor)]
    if not tensors:
        return args, kwargs, False
    wrapped: Any = iter(_BackwardEnd.apply(end, begin, *tensors))  # type: ignore[no-untyped-call]
    return *map_tensors(lambda tensor: next(wrapped) if _is_differentiable(tensor) else tensor, (args, kwargs)), False


def _on_begin(callback: Callback, output: Any) -> Any:
    """As `runtime.autograd.on_backward_begin`."""
    begin: Any = _BackwardBegin.apply
    return map_tensors(lambda tensor: begin(callback, tensor) if _is_differentiable(tensor) else tensor, output)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether some level of `tensor` may require a gradient."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not isinstance(tensor, nn.Parameter)


hooks.levels.update(end=_on_end, begin=_on_begin)
