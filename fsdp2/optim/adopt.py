"""Optimizers that were made before `fully_shard`, and a warning for those that hold parameters of the past.
Layer: optim.

`fully_shard` replaces parameter objects, and so do `load_state_dict(assign=True)` and the like. An optimizer that holds
the originals, or the unsharded parameters (it was made while a unit was unsharded), steps on tensors that nobody uses
any more, and nothing would tell. Nor would it for one that holds plain parameters on the meta device, in whose places
`Module.to_empty` has put others.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2.errors import ArgumentError
from fsdp2.runtime.parameter import ManagedParameter, managed_by, num_replaced
from fsdp2.runtime.step_hook import before_each_step

__all__ = ["adopt_optimizer"]

# State of 0-dim parameters in torch's optimizers that is a counter, although it has the parameter's shape.
COUNTERS = frozenset({"eta", "mu", "mu_product", "step"})

MAKE_IT_LATER = "Make the optimizer after the model has its values."

# How many param groups each optimizer had, and how many sharded parameters had been replaced, when it was last looked
# at.
_checked: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()


def adopt_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made before `fully_shard` optimize the sharded parameters.

    In place: in the param groups each original parameter gives way to the sharded one that it became, with its options
    and its place. Its state moves along: what has the parameter's shape is cut to this rank's shard and becomes a
    DTensor like the parameter, be it state made with the optimizer (Adagrad) or by steps; counters stay as they are.
    A scheduler or a `GradScaler` that knows the optimizer keeps working; a training that began unsharded goes on.

    Call it after the last `fully_shard`; all ranks hold the same state before, so nothing is communicated. Parameters
    that are not sharded, or have been adopted, stay as they are: calling it again does nothing. An optimizer that was
    made while units were unsharded, or before ``load_state_dict(assign=True)`` put other parameters there, is repaired
    the same way.

    Args:
        optimizer: of any kind that keeps what it knows of a parameter in ``optimizer.state[param]``.

    Raises:
        ArgumentError: state is on the meta device while its parameter is not: its values are nowhere. Nothing has
            changed then.

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
        # The list stays: some optimizers keep it apart from their groups.
        group["params"][:] = [stale[param].sharded if param in stale else param for param in group["params"]]
    moved = [
        (stale[param].sharded, states[param]) if param in states else (param, state)
        for param, state in optimizer.state.items()
    ]
    optimizer.state.clear()
    optimizer.state.update(moved)


def _successor(param: torch.Tensor) -> ManagedParameter | None:
    """What manages `param` now, if that is a parameter of the past."""
    managed = managed_by(param)
    return None if managed is None or managed.sharded is param else managed


def _check_state_has_memory(optimizer: torch.optim.Optimizer) -> None:
    """Raise for state that was made with the optimizer (Adagrad's) when its parameter was on the meta device still."""
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
    """This rank's part of a piece of state, as a DTensor like the sharded parameter; counters as they are."""
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
        return value  # of a sharded parameter that was replaced
    piece = _piece(local_tensor(value) if isinstance(value, DTensor) else value, managed)
    own = torch.empty_like(local, dtype=value.dtype)  # with the parameter's strides
    own.copy_(piece)
    spec = make_spec(sharded.device_mesh, sharded.placements, sharded.shape, sharded.stride(), value.dtype)
    return make_dtensor(own, spec)


def _piece(whole: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    """This rank's shard of what has the shape of the (tensor-parallel: local) whole parameter."""
    roles, dim = managed.roles, managed.layout.dim
    piece = managed.to_memory(whole)
    piece = piece.narrow(dim, managed.layout.bounds[roles.shard_rank], managed.layout.local_size(roles.shard_rank))
    if managed.outer is not None:
        rank = roles.replicate_rank
        piece = piece.narrow(dim, managed.outer.bounds[rank], managed.outer.local_size(rank))
    return managed.from_memory(piece)


# --- the warning ------------------------------------------------------------------------------------------------------


def _warn_of_stale_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Before an optimizer's step: look at its parameters, unless that has been done."""
    state = len(optimizer.param_groups), num_replaced()
    if _checked.get(optimizer) == state:
        return
    _checked[optimizer] = state
    held = [param for group in optimizer.param_groups for param in group["params"]]
    names = [managed.fqn for param in held if (managed := _successor(param)) is not None]
    if names:
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(names)} parameters that fully_shard has replaced, or something "
            f"after it ({some}): it was made before fully_shard, before load_state_dict(assign=True) or the like, or "
            "while units were unsharded. Its steps change nothing in the model. Make it afterwards, or call "
            "fsdp2.adopt_optimizer(optimizer).",
            stacklevel=4,
        )
    _check_state_has_memory(optimizer)
    on_meta = [tuple(param.shape) for param in held if param.is_meta and param.grad is None]
    if 0 < len(on_meta) < len(held):
        some = ", ".join(map(str, on_meta[:5])) + (", ..." if len(on_meta) > 5 else "")
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(on_meta)} parameters on the meta device (of shapes {some}), in "
            "whose places the model has others by now: Module.to_empty replaces parameters that are not sharded. Its "
            "steps do not change them. Make it after to_empty, or use fsdp2.init.materialize, which keeps them.",
            stacklevel=4,
        )


before_each_step(_warn_of_stale_parameters)
