"""Optimizers that were created before `fully_shard`, and a warning for those that hold replaced parameters. Layer:
optim.

`fully_shard`, `load_state_dict(assign=True)` and similar calls replace parameter objects. An optimizer that holds the
originals, or the unsharded parameters (it was created while a unit was unsharded), silently steps tensors that the
model no longer uses. So does one that holds plain parameters on the meta device that `Module.to_empty` has replaced.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2.checks.step_hook import before_each_step
from fsdp2.errors import ArgumentError
from fsdp2.placement.hooks import COUNTERS
from fsdp2.runtime.parameter import ManagedParameter, managed_by, num_replaced

__all__ = ["adopt_optimizer"]

MAKE_IT_LATER = "Create the optimizer after the model has its values."

# By optimizer: the numbers of its param groups and of replaced sharded parameters at the last check.
_checked: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()


def adopt_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that was created before `fully_shard` step the sharded parameters.

    Works in place: in the param groups each original parameter is replaced by its sharded parameter, with the same
    options and position. State that has the parameter's shape is reduced to this rank's shard and becomes a DTensor
    like the parameter, whether it was created with the optimizer (Adagrad) or by steps; counters stay unchanged. A
    scheduler or `GradScaler` that holds the optimizer keeps working, so training that began unsharded can continue.

    Call it after the last `fully_shard`. All ranks must hold the same state; nothing is communicated. Parameters that
    are not sharded, or were already adopted, stay as they are, so a second call does nothing. An optimizer that was
    created while units were unsharded, or before ``load_state_dict(assign=True)`` replaced parameters, is repaired in
    the same way.

    Args:
        optimizer: any optimizer that keeps its per-parameter state in ``optimizer.state[param]``.

    Raises:
        ArgumentError: state is on the meta device while its parameter is not, so it has no values. Then nothing is
            changed.

    Example::

        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fsdp2.adopt_optimizer(optimizer)
    """
    held = [param for group in optimizer.param_groups for param in group["params"]]
    _check_state_has_memory(optimizer)
    stale = {param: managed for param in held if (managed := _successor(param)) is not None}
    states = {
        param: _sharded_state(optimizer.state[param], stale[param]) for param in stale if param in optimizer.state
    }
    for group in optimizer.param_groups:
        # Keep the list object: some optimizers also refer to it outside of their groups.
        group["params"][:] = [stale[param].sharded if param in stale else param for param in group["params"]]
    moved = [
        (stale[param].sharded, states[param]) if param in states else (param, state)
        for param, state in optimizer.state.items()
    ]
    optimizer.state.clear()
    optimizer.state.update(moved)


def _successor(param: torch.Tensor) -> ManagedParameter | None:
    """The managed parameter that has replaced `param` in the model, or None."""
    managed = managed_by(param)
    return None if managed is None or managed.sharded is param else managed


def _check_state_has_memory(optimizer: torch.optim.Optimizer) -> None:
    """Raise for state that was created with the optimizer (Adagrad) while its parameter was still on the meta
    device."""
    for param, state in optimizer.state.items():
        if not param.is_meta and isinstance(state, dict):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise ArgumentError(
                        f"{type(optimizer).__name__}: the state '{key}' of a parameter of shape {tuple(param.shape)} "
                        f"is on the meta device, the parameter on {param.device}. {MAKE_IT_LATER}"
                    )


def _sharded_state(state: dict[str, Any], managed: ManagedParameter) -> dict[str, Any]:
    return {key: _sharded_value(key, value, managed) for key, value in state.items()}


def _sharded_value(key: str, value: Any, managed: ManagedParameter) -> Any:
    """This rank's part of a state tensor, as a DTensor like the sharded parameter; counters are returned unchanged."""
    sharded = managed.sharded
    if not isinstance(value, torch.Tensor) or value.shape != sharded.shape or (not value.ndim and key in COUNTERS):
        return value
    assert isinstance(sharded, DTensor)
    local = local_tensor(sharded)
    if value.is_meta and not local.is_meta:
        raise ArgumentError(
            f"'{managed.fqn}': the optimizer's state '{key}' is on the meta device, the parameter on {local.device}. "
            f"{MAKE_IT_LATER}"
        )
    if isinstance(value, DTensor) and value.device_mesh == sharded.device_mesh:
        return value  # the replaced parameter was already sharded
    piece = _piece(local_tensor(value) if isinstance(value, DTensor) else value, managed)
    own = torch.empty_like(local, dtype=value.dtype)  # with the parameter's strides
    own.copy_(piece)
    spec = make_spec(sharded.device_mesh, sharded.placements, sharded.shape, sharded.stride(), value.dtype)
    return make_dtensor(own, spec)


def _piece(whole: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    """This rank's shard of a tensor that has the shape of the whole parameter (its local tensor with tensor
    parallelism)."""
    roles, dim = managed.roles, managed.layout.dim
    piece = managed.geometry.to_memory(whole)
    piece = piece.narrow(dim, managed.layout.bounds[roles.shard_rank], managed.layout.local_size(roles.shard_rank))
    if managed.geometry.outer is not None:
        rank = roles.replicate.rank
        piece = piece.narrow(dim, managed.geometry.outer.bounds[rank], managed.geometry.outer.local_size(rank))
    return managed.geometry.from_memory(piece)


# --- the warning ------------------------------------------------------------------------------------------------------


def _warn_of_stale_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer's parameters before its step, unless that was already done."""
    state = len(optimizer.param_groups), num_replaced()
    if _checked.get(optimizer) == state:
        return
    _checked[optimizer] = state
    held = [param for group in optimizer.param_groups for param in group["params"]]
    names = [managed.fqn for param in held if (managed := _successor(param)) is not None]
    if names:
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(names)} parameters ({some}) that the model no longer has: it was "
            "created before fully_shard or load_state_dict(assign=True), or while units were unsharded. Its steps do "
            "not change the model. Create it afterwards, or call fsdp2.adopt_optimizer(optimizer).",
            stacklevel=4,
        )
    _check_state_has_memory(optimizer)
    on_meta = [tuple(param.shape) for param in held if param.is_meta and param.grad is None]
    if 0 < len(on_meta) < len(held):
        some = ", ".join(map(str, on_meta[:5])) + (", ..." if len(on_meta) > 5 else "")
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(on_meta)} parameters on the meta device (of shapes {some}) "
            "that the model no longer has: Module.to_empty replaces parameters that are not sharded. Its steps do not "
            "change the model. Create it after to_empty, or use fsdp2.init.materialize, which keeps them.",
            stacklevel=4,
        )


before_each_step(_warn_of_stale_parameters)
