"""Gradient clipping by norm, on local shards. Layer: optim.

torch's functions also work on DTensors, but send each gradient through DTensor's dispatch several times, all-reduce
once per mesh axis, and fail for several meshes in one call. Here there is one foreach norm and one multiplication per
device and dtype, and mostly one all-reduce of a single number (see `norms`).
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from math import inf
from operator import is_not

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import grad_of, local_of
from fsdp2._torch.optim import foreach_multiply
from fsdp2.checks.left_out import warn_in_clip
from fsdp2.checks.unreduced import check_reduced
from fsdp2.errors import ArgumentError
from fsdp2.optim.flats import joined
from fsdp2.optim.in_backward import check_not_stepped_in_backward
from fsdp2.optim.norms import by_device_and_dtype, norm_of
from fsdp2.runtime.parameter import managed_by

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that their total norm is at most `max_norm`.

    Replaces `torch.nn.utils.clip_grad_norm_`, with the same arguments and result. Each element counts once, no matter
    how many ranks hold it.

    Collective: every rank of the parameters' meshes must call it with the same parameters in the same order. A rank may
    lack gradients that others have.

    Args:
        parameters: DTensors on any number of meshes, with any placements, and plain tensors, which must have the same
            gradients on all ranks. An unsharded parameter stands for its sharded one.
        max_norm: the largest norm to allow.
        norm_type: any number above 0, ``inf`` (the largest absolute value) or ``-inf`` (the smallest).
        error_if_nonfinite: raise, before anything is scaled, if the norm is infinite or NaN.
        foreach: False processes the tensors one by one.

    Returns:
        The norm before scaling: a plain 0-dim tensor, the same on every rank, on the first gradient's device, in
        float32 (float64 if any parameter is float64).

    Raises:
        ArgumentError: a `norm_type` that is none of the above.
        RuntimeError: see `error_if_nonfinite`.
        OrderError: a backward has stepped these parameters already (`step_in_backward`); or this is the second use of
            unreduced gradients, and none was ever reduced.

    Example::

        loss.backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
    """
    parameters, grads = _with_gradients(_list(parameters))
    check_not_stepped_in_backward("clip_grad_norm_", parameters)
    check_reduced("clip_grad_norm_", parameters)
    warn_in_clip(parameters)
    total, parts = _total_norm(parameters, grads, norm_type, error_if_nonfinite, foreach)
    _scale(_parts(grads) if parts is None else parts, max_norm, total, foreach)
    return total


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all elements of `tensors` (parameters or gradients), without changing them.

    Replaces `torch.nn.utils.get_total_norm`. Collective, with the arguments and result of `clip_grad_norm_`. DTensors
    that are partial sums are reduced first, with one collective each.

    Raises:
        ArgumentError, RuntimeError: as `clip_grad_norm_`.

    Example::

        norm = fsdp2.optim.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    """
    tensors = _list(tensors)
    return _total_norm(tensors, tensors, norm_type, error_if_nonfinite, foreach)[0]


def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale the gradients, in place, by ``min(max_norm / (total_norm + 1e-6), 1)``. No communication.

    Replaces `torch.nn.utils.clip_grads_with_norm_`. Use it with a `total_norm` that covers more than `parameters`, for
    example all stages of a pipeline.

    Args:
        parameters: as for `clip_grad_norm_`.
        max_norm: the largest norm to allow.
        total_norm: a plain 0-dim tensor.
        foreach: False processes the tensors one by one.

    Raises:
        OrderError: as `clip_grad_norm_`.

    Example::

        norm = fsdp2.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        fsdp2.clip_grads_with_norm_(model.parameters(), 1.0, norm)

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grads_with_norm_.html
    """
    parameters, grads = _with_gradients(_list(parameters))
    check_not_stepped_in_backward("clip_grads_with_norm_", parameters)
    check_reduced("clip_grads_with_norm_", parameters)
    _scale(_parts(grads), max_norm, total_norm, foreach)


def _with_gradients(params: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The parameters, with sharded ones instead of their unsharded forms, and the gradients."""
    grads = list(map(grad_of, params))
    if not all(map(is_not, grads, repeat(None))):
        params = [_sharded_form(param) if param.requires_grad and param.grad is None else param for param in params]
        grads = list(map(grad_of, params))
    return params, grads


def _sharded_form(param: torch.Tensor) -> torch.Tensor:
    managed = managed_by(param)
    return param if managed is None or managed.unsharded is not param else managed.sharded


def _parts(grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Their local tensors; contiguous ones are joined."""
    return joined([_local(grad) for grad in grads if grad is not None])[1]


def _scale(grads: Sequence[torch.Tensor], max_norm: float, total_norm: torch.Tensor, foreach: bool | None) -> None:
    factor = (float(max_norm) / (total_norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for (device, _), list_ in by_device_and_dtype(grads).items():
            if foreach is None or foreach:
                foreach_multiply(list_, factor.to(device))
            else:
                for grad in list_:
                    grad.mul_(factor.to(device))


def _total_norm(
    like: list[torch.Tensor],
    tensors: list[torch.Tensor] | list[torch.Tensor | None],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    norm_type = float(norm_type)
    if not (norm_type > 0 or norm_type == -inf):
        raise ArgumentError(f"norm_type: expected a number above 0, inf or -inf, got {norm_type}")
    with torch.no_grad():
        total, parts = norm_of(like, tensors, norm_type, foreach is None or foreach)
        if error_if_nonfinite and not total.isfinite():
            here = [index for index, tensor in enumerate(tensors) if tensor is not None and not _is_finite(tensor)]
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. On this "
                f"rank the gradients of parameters number {here} hold values that are not finite. Skip this step, "
                "or pass error_if_nonfinite=False to scale by such a norm anyway."
            )
    return total, parts


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_local(tensor).isfinite().all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _list(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
