"""Zeros for gradients that only some ranks have, and `register_hook` of sharded parameters. Layer: extras."""

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import DTensorSpec, backward_hooks_of, local_tensor
from fsdp2.errors import ArgumentError
from fsdp2.runtime import hooks
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.sink import Params, distributed


def _fill(params: Params, grads: list[torch.Tensor | None], which: bool | frozenset[int]) -> None:
    """Put zeros where a trainable parameter has no gradient."""
    for index in range(len(params)) if isinstance(which, bool) else sorted(which):
        param = params[index]
        if not param.sharded.requires_grad:
            continue
        if param.sharded.grad_dtype is None and param.plan.policy.reduce_dtype is None:
            raise ArgumentError(
                f"'{param.fqn}': a gradient that some ranks do not have is reduced as zeros there (as "
                "set_reduce_scatter_unused_params(True) asks for), so all must know its dtype; its grad_dtype is "
                "None. Set that, or the policy's reduce_dtype."
            )
        if grads[index] is None:
            zeros = torch.zeros(param.layout.shape, dtype=param.reduce_dtype, device=param.roles.device)
            grads[index] = param.geometry.from_memory(zeros)


def _hooked(param: ManagedParameter, local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Run the user's `register_hook` hooks, which autograd has not run, on a reduced gradient. Returns their result."""
    grad = distributed(local, spec, param.sharded.device)
    for hook in (backward_hooks_of(param.sharded) or {}).copy().values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    if not isinstance(grad, DTensor) or local_tensor(grad).shape != local.shape:
        raise ArgumentError(
            f"a hook of '{param.fqn}' returned a {type(grad).__name__}; expected None or a DTensor of the shape and "
            "placements of the gradient that it was given"
        )
    return local_tensor(grad).to(local.dtype)


hooks.gradients["unused"] = _fill
hooks.gradients["register_hook"] = _hooked
