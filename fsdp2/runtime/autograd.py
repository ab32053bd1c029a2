"""Where a unit's backward begins and ends in the autograd graph. Layer: runtime.

::

    forward      inputs --> [_BackwardEnd] --> the unit's modules --> outputs
    backward     inputs <-- [_BackwardEnd] <-- the unit's modules <-- hook on each output

The hook on an output runs when its gradient is available, before the unit's backward. `_BackwardEnd` passes the inputs'
gradients through afterwards. If no input needs a gradient, the unit's backward ends with the whole backward. A backward
that builds a graph (``create_graph=True``) can itself be differentiated. That second backward begins where the first
one ended, at the gradients of the inputs, so these get the same hook as an output.

For transforms of `torch.func` and forward-mode AD, in which tensors have levels, see `hooks.levels`.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fsdp2._torch import base_of, forward_level, number_of_node, plain_apply, transforms_are_active, will_run_node
from fsdp2.events import profiler_range
from fsdp2.runtime import hooks
from fsdp2.runtime.tree import map_tensors, tensors_in, tensors_within

Callback = Callable[..., None]
_needs_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")

# A leaf that every `_BackwardEnd` takes as an input, and that never gets a gradient. A backward that passes through
# such an end runs the leaf's node, unless it was given `inputs` or is `torch.autograd.grad`. So this says whether the
# running backward computes all gradients.
_leaf = torch.zeros(0, requires_grad=True)
backward_is_whole: Callable[[], bool] = partial(will_run_node, get_gradient_edge(_leaf).node)


class _BackwardEnd(torch.autograd.Function):
    """Identity whose backward calls `end`; a backward through that backward first calls `begin`."""

    @staticmethod
    def forward(
        ctx: Any, end: Callback, begin: Callback, _leaf: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.end, ctx.begin = end, begin
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.end()
        if torch.is_grad_enabled():
            grads = on_backward_begin(ctx.begin, grads)
        return (None, None, None, *grads)


_end = plain_apply(_BackwardEnd)


def on_backward_end(
    end: Callback, begin: Callback, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Wrap the inputs of a forward: `end` runs when backward has passed through all of them, `begin` when a backward
    through that backward reaches them. The third result: whether `backward_is_whole` can be used in its backward."""
    if transforms_are_active() or forward_level() >= 0:
        return hooks.implementation(hooks.levels, "end", "torch.func")(end, begin, args, kwargs)  # type: ignore[no-any-return]
    tensors = list(filter(_needs_grad, tensors_in((args, kwargs) if kwargs else args)))
    if not tensors:
        return args, kwargs, False
    wrapped: Any = iter(_end(end, begin, _leaf, *tensors))
    if not kwargs and len(args) == 1 and args[0] is tensors[0]:
        return (next(wrapped),), kwargs, True
    return *map_tensors(lambda tensor: next(wrapped) if tensor.requires_grad else tensor, (args, kwargs)), True


def on_backward_begin(callback: Callback, output: Any, since: int = 0) -> Any:
    """Hook `output`: `callback` runs in backward when the gradient of a tensor in it is available, once for each
    tensor. `since`: `next_node_number()` at the beginning of the forward that made `output`."""
    if transforms_are_active() or forward_level() >= 0:
        return hooks.implementation(hooks.levels, "begin", "torch.func")(callback, output)
    if isinstance(output, torch.Tensor):
        tensors = [output]
    else:
        tensors, inner = tensors_within(output)
        # An object such as a cache is passed from unit to unit, and also holds tensors of earlier units.
        tensors += [each for each in inner if each.grad_fn is not None and number_of_node(each.grad_fn) >= since]
    for tensor in filter(_needs_grad, tensors):
        # A parameter that is returned unchanged has no backward of its own, and would keep the hook forever.
        if type(tensor) is torch.Tensor or not isinstance(tensor, nn.Parameter):
            tensor.register_hook(callback)
            base = base_of(tensor)
            node = None if base is None else base.grad_fn
            if node is not None and number_of_node(node) >= since:
                # An in-place change gives a view a new node, and the hook stays on the old one; the base's node remains
                # in the graph. A view of an input (or an input returned as it is) has a base from before the forward,
                # whose backward comes after that of this unit.
                node.register_prehook(callback)
    return output


def cast_floating(dtype: torch.dtype, value: Any, name: str) -> Any:
    """`value` with its floating-point tensors cast to `dtype`; `name` is that of the profiler range."""
    with profiler_range(name):
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
