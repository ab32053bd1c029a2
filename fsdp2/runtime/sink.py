"""`Sink`: where the reduced gradients of one reduction go. Layer: runtime, below the reduction.

A reduction ends with one flat tensor: this rank's rows of each gradient, one after the other, each padded to the size
of a full shard. `receive` casts and moves it, on the stream that reduced. `deliver` gets views of it, once compute may
use them::

    flat  [a0 b0 g0]  --receive-->  [a0 b0 g0]  --views-->  a0, b0, g0  --deliver-->  a.grad = a0, b.grad += b0, ...
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import is_not, methodcaller
from typing import Any

import torch

from fsdp2._torch import (
    DTensorSpec,
    backward_hooks_of,
    foreach_add,
    grad_of,
    local_tensor,
    make_dtensor,
    plain_dtensor,
    set_grad,
    set_local_tensor,
)
from fsdp2.runtime import hooks
from fsdp2.runtime.parameter import ManagedParameter, Plan, sharded_of

Params = Sequence[ManagedParameter]
is_there: Callable[[object], bool] = partial(is_not, None)


class Sink:
    """Sets, or adds to, the `.grad` of `params`.

    Attributes:
        is_on_host: the gradients go to host memory, where stream order does not apply.
        receive: casts and moves a flat output, on the current stream.
        views: shape, stride and offset of each gradient in what `receive` returned.
    """

    def __init__(self, params: Params):
        self.params, plan = params, params[0].plan
        self._dtypes = [param.grad_dtype for param in params]
        self._are_mixed = len(set(self._dtypes)) > 1
        common = reduce(torch.promote_types, self._dtypes)
        self.is_on_host = plan.grad_home != plan.roles.device
        self.receive: Callable[[torch.Tensor], torch.Tensor] = methodcaller("to", common)
        if self.is_on_host:
            self.receive = partial(_to_host, plan, common)
        sizes = [param.geometry.local[0].padded_numel for param in params]
        shapes, strides = zip(*(param.geometry.view for param in params), strict=True)
        self.views = shapes, strides, list(accumulate(sizes[:-1], initial=0))
        self._sharded = list(map(sharded_of, params))
        self._specs = [param.plan.specs.sharded(dtype) for param, dtype in zip(params, self._dtypes, strict=True)]
        device = params[0].sharded.device
        self._make: Any = plain_dtensor if plan.grad_home == device else partial(distributed, device=device)

    def deliver(self, grads: Iterable[torch.Tensor]) -> Params:
        """Take these gradients, one for each parameter. Returns the parameters whose gradient is complete now."""
        if self._are_mixed:
            grads = map(torch.Tensor.to, grads, self._dtypes)
        if not any(map(backward_hooks_of, self._sharded)) and not any(map(is_there, map(grad_of, self._sharded))):
            list(map(set_grad, self._sharded, map(self._make, grads, self._specs)))  # a Python loop takes twice as long
            return self.params
        old, new = [], []
        for param, grad, spec in zip(self.params, grads, self._specs, strict=True):
            sharded = param.sharded
            if backward_hooks_of(sharded):
                run = hooks.implementation(hooks.gradients, "register_hook", "register_hook of a sharded parameter")
                grad = run(param, grad, spec)
            if (before := sharded.grad) is None:
                sharded.grad = self._make(grad, spec)
            else:
                old.append(local_tensor(before))
                new.append(grad)
        if old:
            foreach_add(old, new)
        return self.params


def _to_host(plan: Plan, dtype: torch.dtype, flat: torch.Tensor) -> torch.Tensor:
    flat = flat.to(dtype)
    host = torch.empty_like(flat, device=plan.grad_home, pin_memory=plan.offload.pins)
    return host.copy_(flat, non_blocking=True)


def distributed(local: torch.Tensor, spec: DTensorSpec, device: torch.device) -> torch.Tensor:
    """A gradient whose DTensor reports `device`, as its parameter does: torch rejects one that reports another."""
    if local.device == device:
        return make_dtensor(local, spec)
    grad = make_dtensor(torch.empty_like(local, device=device), spec)
    set_local_tensor(grad, local, spec)
    return grad
