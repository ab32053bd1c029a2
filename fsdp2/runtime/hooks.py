"""Where a unit's backward begins and ends in the autograd graph. Layer: runtime.

::

    forward      inputs --> [_BackwardEnd] --> the unit's modules --> outputs
    backward     inputs <-- [_BackwardEnd] <-- the unit's modules <-- hook on each output

The hook on an output runs when its gradient is there, before the unit's backward. `_BackwardEnd` passes gradients of
the inputs through after it. Inputs that need no gradient have no such end; the root's final callback serves instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2._torch import base_of, func_transforms_are_active
from fsdp2.runtime.tree import map_tensors, tensors_in

__all__ = ["cast_floating", "on_backward_begin", "on_backward_end"]


class _BackwardEnd(torch.autograd.Function):
    """Identity whose backward calls `callback`."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.callback()
        return (None, *grads)


class _BackwardEndOfTransforms(torch.autograd.Function):
    """The same as torch.func asks for it: `setup_context` and `jvp`. Calling it costs four times as much."""

    @staticmethod
    def forward(callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.callback()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _callback: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)


def on_backward_end(
    callback: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a forward, such that `callback` runs when backward has come through all of them."""
    tensors = [tensor for tensor in tensors_in((args, kwargs) if kwargs else args) if tensor.requires_grad]
    if not tensors:
        return args, kwargs
    function: Any = _BackwardEndOfTransforms if func_transforms_are_active() else _BackwardEnd
    wrapped = iter(function.apply(callback, *tensors))
    if not kwargs and len(args) == 1 and args[0] is tensors[0]:
        return (next(wrapped),), kwargs
    return map_tensors(lambda tensor: next(wrapped) if tensor.requires_grad else tensor, (args, kwargs))  # type: ignore[no-any-return]


def on_backward_begin(callback: Callable[[torch.Tensor], None], output: Any) -> None:
    """Run `callback` in backward when the gradient of a tensor in `output` is there; once for each tensor."""
    for tensor in tensors_in(output):
        # A parameter that is returned as it is has no backward of its own, and would keep the hook for life.
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            tensor.register_hook(callback)
            base = base_of(tensor)
            node = None if base is None else base.grad_fn
            if node is not None:
                # Changing a view in place gives it a new node, and the hook stays on the old one; the base's node
                # remains in the graph.
                node.register_prehook(lambda grads: callback(grads[0]))


def cast_floating(dtype: torch.dtype | None, value: Any) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
