"""`Sink`: where the reduced gradients of one reduction go. Layer: runtime, below the reduction.

A reduction ends with one flat tensor: this rank's rows of each gradient, one after the other, each padded to the size
of a full shard. `receive` casts and moves it, on the stream that reduced; `deliver` gets views of it, when compute may
use them::

    flat  [a0 b0 g0]  --receive-->  [a0 b0 g0]  --views-->  a0, b0, g0  --deliver-->  a.grad = a0, b.grad += b0, ...

============  ======================================================================================================
`Sink`        gradients stay on the device
`HostSink`    offloaded gradients: copied to the host
============  ======================================================================================================
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import methodcaller
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import (
    DTensorSpec,
    backward_hooks_of,
    foreach_add,
    local_tensor,
    make_dtensor,
    plain_dtensor,
    set_local_tensor,
    tensor_hooks,
)
from fsdp2.errors import ArgumentError
from fsdp2.runtime.parameter import ManagedParameter, Plan

Params = Sequence[ManagedParameter]


class Sink:
    """Sets, or adds to, the `.grad` of `params`.

    Attributes:
        is_on_host: the gradients are in host memory, to which no order of streams applies.
        receive: casts and moves a flat output, on the current stream.
        views: shape, stride and offset of each gradient in what `receive` returned.
    """

    is_on_host = False

    def __init__(self, params: Params):
        self.params = params
        self._dtypes = [param.grad_dtype for param in params]
        self._are_mixed = len(set(self._dtypes)) > 1
        common = reduce(torch.promote_types, self._dtypes)
        self.receive: Callable[[torch.Tensor], torch.Tensor] = methodcaller("to", common)
        sizes = [param.geometry.local[0].padded_numel for param in params]
        shapes, strides = zip(*(param.geometry.view for param in params), strict=True)
        self.views = shapes, strides, list(accumulate(sizes[:-1], initial=0))
        self._specs = [param.plan.specs.sharded(dtype) for param, dtype in zip(params, self._dtypes, strict=True)]
        device = params[0].sharded.device
        is_there = params[0].plan.grad_home == device
        self._make: Any = plain_dtensor if is_there else partial(distributed, device=device)

    def deliver(self, grads: Iterable[torch.Tensor]) -> Params:
        """Take these gradients, one for each parameter. Returns the parameters whose gradient is complete now."""
        if self._are_mixed:
            grads = map(torch.Tensor.to, grads, self._dtypes)
        old, new = [], []
        for param, grad, spec in zip(self.params, grads, self._specs, strict=True):
            sharded = param.sharded
            if backward_hooks_of(sharded):
                grad = _hooked(param, grad, spec)
            if (before := sharded.grad) is None:
                sharded.grad = self._make(grad, spec)
            else:
                old.append(local_tensor(before))
                new.append(grad)
        foreach_add(old, new)
        return self.params


class HostSink(Sink):
    """The same for gradients that live on the host."""

    is_on_host = True

    def __init__(self, params: Params):
        super().__init__(params)
        self.receive = partial(_to_host, self.receive, params[0].plan)


def _to_host(cast: Callable[[torch.Tensor], torch.Tensor], plan: Plan, flat: torch.Tensor) -> torch.Tensor:
    flat = cast(flat)
    host = torch.empty_like(flat, device=plan.grad_home, pin_memory=plan.offload.pins)
    return host.copy_(flat, non_blocking=True)


def sink_of(params: Params) -> Sink:
    """The sink of a reduction of these parameters."""
    plan = params[0].plan
    return Sink(params) if plan.grad_home == plan.roles.device else HostSink(params)


def distributed(local: torch.Tensor, spec: DTensorSpec, device: torch.device) -> torch.Tensor:
    """A gradient for a parameter that says it is on `device`: torch refuses one that says another."""
    if local.device == device:
        return make_dtensor(local, spec)
    grad = make_dtensor(torch.empty_like(local, device=device), spec)
    set_local_tensor(grad, local, spec)
    return grad


def _hooked(param: ManagedParameter, local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What the user's `register_hook` hooks make of a reduced gradient; autograd has not run them."""
    grad = distributed(local, spec, param.sharded.device)
    for hook in tensor_hooks(param.sharded):
        changed = hook(grad)
        grad = grad if changed is None else changed
    if not isinstance(grad, DTensor) or local_tensor(grad).shape != local.shape:
        raise ArgumentError(
            f"a hook of '{param.fqn}' returned a {type(grad).__name__}; expected None or a DTensor of the shape and "
            "placements of the gradient that it was given"
        )
    return local_tensor(grad).to(local.dtype)
