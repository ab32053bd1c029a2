"""`full_params`: temporarily replace sharded parameters by whole, plain ones. Layer: extras.

::

    enter    reshard; gather each parameter in its original dtype; the slots hold whole ones, the units manage nothing
    body     the model is a plain one: read, change, initialise, load, save, run it
    leave    copy this rank's rows of the whole parameters into the sharded ones; the slots hold these again

The hooks of a unit that manages nothing do nothing, so a forward in the body computes with the whole parameters and
does not communicate.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp2._torch import backward_is_running, local_tensor, parameter_slots
from fsdp2._torch.shared import full_tensor
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.runtime import hooks
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.root import become_root, units_below
from fsdp2.runtime.state import Stage
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit, unit_of
from fsdp2.watch.exchange import Exchange, at_once

_open: WeakSet[Unit] = WeakSet()  # the units whose parameters are whole now


@contextmanager
def full_params(
    module: nn.Module,
    *,
    write_back: bool = True,
    recurse: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within this context the modules hold whole, plain `nn.Parameter`s in their original dtype, under their own names;
    tied names hold one object. On exit the modules hold the same sharded parameters as before, updated with the
    changes.

    Collective: every rank of the mesh must enter it, for the same module, at the same point between two iterations. It
    needs memory for all these parameters at once. A forward in the body uses the whole parameters in their original
    dtype, without communication (not possible in a tensor-parallel model, whose layers expect DTensors). A backward
    through them raises: the gradients would differ between ranks.

    Args:
        module: the units at and below it are gathered; parameters of a unit above it stay sharded.
        write_back: on exit each rank copies its rows of the current values, also if a parameter was replaced by another
            of the same shape, so all ranks must make the same changes. False: changes are dropped. They are also
            dropped if the body raises, because they may be incomplete or differ between ranks.
        recurse: False gathers only the unit of `module`.
        rank0_only: only the first rank of the mesh holds whole parameters; the others hold sharded ones and cannot run
            forward. The first rank's changes are sent to all; if any rank raises, all do, and nothing is written.
        offload_to_cpu: keep the whole parameters in host memory; only one at a time is on the device.
        with_grads: gather the reduced gradients into `.grad` and write them back like the parameters; otherwise `.grad`
            is None.

    Raises:
        ArgumentError: no unit is at or below `module`; `rank0_only` and `write_back` with `with_grads`, or with
            parameters on several meshes; on exit, a parameter that was replaced by something of another shape (nothing
            is written then).
        OrderError: a backward reaches the whole parameters; called in forward or backward, after one that raised, or
            within another `full_params` of the same unit; or parameters are on the meta device. With `rank0_only` and
            `write_back`: another rank has raised.

    Example::

        with full_params(model):
            model.embed.weight[pad_id] = 0  # under torch.no_grad()
        with full_params(model, write_back=False, rank0_only=True, offload_to_cpu=True):
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), "model.pt")

    Source: summon_full_params of FSDP1, https://docs.pytorch.org/docs/stable/fsdp.html.
    """
    if with_grads and rank0_only and write_back:
        raise ArgumentError("full_params: gradients of rank0_only cannot be written back; pass write_back=False")
    units = _units(module, recurse)
    _check_order(units)
    params = _sharded_params(units)
    meshes = list(dict.fromkeys(map(_mesh_of, params)))
    if rank0_only and write_back:
        _check_one_first_rank(meshes)
    holds = not rank0_only or all(map(_is_first, meshes))
    wholes: dict[ManagedParameter, nn.Parameter] = {}
    with ExitStack() as undo:
        undo.callback(_settle_new_roots, [(unit, unit.step, unit.settings.reshard_after_forward) for unit in units])
        _empty(units, undo)
        for param in params:
            undo.callback(partial(param.put, param.sharded))
        for param in params:
            whole = _gather(param, offload_to_cpu, with_grads)
            if holds:
                param.put(whole)
                wholes[param] = whole
        if not holds:
            for unit in units:
                _forbid_forward(unit, undo)
        must_agree = rank0_only and write_back and bool(meshes)
        try:
            yield
            if write_back:
                _check_unchanged_shapes(wholes)
        except Exception:
            if must_agree:
                _failed_rank(meshes[0], True)
            raise
        if must_agree and (failed := _failed_rank(meshes[0], False)) >= 0:
            raise OrderError(
                f"full_params: rank {failed} has raised an exception within the context or at its end, so no rank "
                "writes back. See its message."
            )
        if write_back:
            for param in params:
                _write_back(param, holds, rank0_only, with_grads)


# --- entering ---------------------------------------------------------------------------------------------------------


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    own = unit_of(module)
    units = units_below(module) if recurse else [own] if own is not None else []
    if not units:
        raise ArgumentError(
            f"full_params: no unit {'at or below' if recurse else 'at'} this {type(module).__name__}; pass the module "
            "that fully_shard was called on, or one that contains it"
        )
    return units


def _check_order(units: Sequence[Unit]) -> None:
    for unit in units:
        if unit in _open:
            raise OrderError(
                f"full_params: the parameters of unit '{unit.fqn or '(root)'}' are whole already, in an outer call"
            )
        in_forward = unit.step is not None and unit.step.order is not None
        if in_forward or backward_is_running() or unit.state.stage is not Stage.IDLE:
            raise OrderError(
                f"full_params: unit '{unit.fqn or '(root)'}' is in a forward or backward; open the context between "
                "iterations. If that forward or backward raised, call reset_iter_state() on the root first, on every "
                "rank."
            )


def _check_one_first_rank(meshes: Sequence[DeviceMesh]) -> None:
    if len({tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}) > 1:
        raise ArgumentError(
            f"full_params: with rank0_only and write_back all parameters must be on the same ranks, got the meshes "
            f"{meshes}; leave out rank0_only, or pass write_back=False"
        )


def _sharded_params(units: Sequence[Unit]) -> list[ManagedParameter]:
    """All parameters of the units, resharded and up to date, in the order of the module tree."""
    for unit in units:
        unit.reshard_all()
        unit.refresh()
    return list(dict.fromkeys(param for unit in units for param in unit.params))


def _empty(units: Sequence[Unit], undo: ExitStack) -> None:
    """Until `undo`, these units manage nothing and cast no inputs, and no other unit gathers their parameters."""

    def change(unit: Unit, **values: Any) -> None:
        for name, value in values.items():
            undo.callback(setattr, unit, name, getattr(unit, name))
            setattr(unit, name, value)

    groups = [group for unit in units for group in unit.groups]
    steps = [unit.step for unit in units if unit.step is not None]
    for unit in dict.fromkeys([*units, *(member for step in steps for member in step.units)]):
        if any(group in groups for group in unit.borrowed):  # weights that are tied across units
            change(unit, borrowed=[group for group in unit.borrowed if group not in groups])
    for unit in units:
        undo.callback(_open.discard, unit)
        _open.add(unit)
        change(unit, groups=[], policy=replace(unit.policy, param_dtype=None))


def _settle_new_roots(before: Sequence[tuple[Unit, Step | None, int | None]]) -> None:
    """A root that ran its first forward in the body saw units without parameters. If all of its units were open, it may
    have run on one rank only: the next forward makes the root again, on all ranks. Otherwise all ranks ran it: name and
    check the parameters now."""
    opened = {unit: reshards for unit, _, reshards in before}
    for step in {unit.step for unit, old, _ in before if unit.step is not old}:
        if step is None or step.is_provisional:
            continue
        root, *others = step.units
        if all(unit in opened or unit in _open or not unit.groups for unit in step.units):
            step.is_provisional = True
            for unit in step.units:
                unit.reset()  # the forward may have raised
                unit.role = None
                if unit in opened and opened[unit] is None:
                    unit.settings = replace(unit.settings, reshard_after_forward=None)
        else:
            for unit in others:
                unit.step = None
            become_root(root)


def _gather(param: ManagedParameter, offload_to_cpu: bool, with_grads: bool) -> nn.Parameter:
    """The whole parameter. Collective over the parameter's mesh."""
    sharded = param.sharded
    data = _whole(sharded, param.roles.device, offload_to_cpu)
    grad = None
    if with_grads and sharded.grad is not None:
        grad = _whole(sharded.grad, param.roles.device, offload_to_cpu)
    whole = nn.Parameter(data, requires_grad=sharded.requires_grad)
    whole.__dict__.update(sharded.__dict__)  # attributes that the user set
    for hook in hooks.params_ignored:
        hook([whole])  # a plain trainable parameter, but only within the context
    if whole.requires_grad:
        whole.register_post_accumulate_grad_hook(partial(_refuse_gradient, param.fqn))
    if grad is not None:
        if grad.dtype != whole.dtype:
            whole.grad_dtype = grad.dtype
        whole.grad = grad
    return whole


def _refuse_gradient(fqn: str, _whole: torch.Tensor) -> None:
    raise OrderError(
        f"full_params: a backward has given '{fqn}' a gradient of this rank alone, which no optimizer would see. For a "
        "loss that reads a parameter outside of forward call unshard() on the module that holds it (docs/"
        "troubleshooting.md); for gradients of this rank use torch.autograd.grad."
    )


@torch.no_grad()
def _whole(tensor: torch.Tensor, device: torch.device, to_cpu: bool) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    on_device = tensor.detach().to(device)
    assert isinstance(on_device, DTensor)
    whole: torch.Tensor = full_tensor(on_device)
    if to_cpu:
        whole = whole.to("cpu")
    if whole.untyped_storage().data_ptr() == local_tensor(tensor).untyped_storage().data_ptr():
        whole = whole.clone()  # on a mesh of one rank it is the shard itself, which only a write-back may change
    return whole


def _mesh_of(param: ManagedParameter) -> DeviceMesh:
    assert isinstance(param.sharded, DTensor)
    return param.sharded.device_mesh


def _is_first(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


def _forbid_forward(unit: Unit, undo: ExitStack) -> None:
    """Let forward raise, on a rank that does not hold the whole parameters."""

    def refuse(module: nn.Module, args: Any) -> None:
        raise OrderError(
            f"'{unit.fqn}' ran forward within full_params(rank0_only=True), on a rank that does not hold the "
            "parameters; run it on the first rank only, or without rank0_only"
        )

    for module in unit.modules:
        undo.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)


# --- leaving ----------------------------------------------------------------------------------------------------------


def _failed_rank(mesh: DeviceMesh, has_failed: bool) -> int:
    """The highest rank of the mesh that has failed, or -1. Collective over the mesh."""
    flag = torch.tensor([dist.get_rank() if has_failed else -1], device=mesh.device_type)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        with at_once(Exchange("end of full_params", None, group, device=flag.device)):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return int(flag.item())


def _check_unchanged_shapes(wholes: dict[ManagedParameter, nn.Parameter]) -> None:
    for param, whole in wholes.items():
        slot = param.slots[0]
        if slot.module is not None and slot.name not in parameter_slots(slot.module):
            raise ArgumentError(
                f"full_params: '{param.fqn}' was removed. A sharded model keeps its parameters: remove weight norm and "
                "parametrizations before fully_shard."
            )
        current = param.slots[0].get()
        if current is whole:
            continue
        if current is None or isinstance(current, DTensor) or current.shape != whole.shape:
            got = "None" if current is None else f"{type(current).__name__} of shape {tuple(current.shape)}"
            raise ArgumentError(
                f"full_params: '{param.fqn}' was replaced by {got}; expected a plain parameter of shape "
                f"{tuple(whole.shape)}. A sharded parameter cannot change its shape: change the model, then shard it."
            )


@torch.no_grad()
def _write_back(param: ManagedParameter, holds: bool, rank0_only: bool, with_grads: bool) -> None:
    """Copy this rank's rows of the module's current parameter into the sharded one. With `rank0_only` it uses the first
    rank's parameter, and is collective over the parameter's mesh."""
    sharded, current = param.sharded, param.slots[0].get()
    assert isinstance(sharded, DTensor)
    if holds:
        assert current is not None
        data = current.detach()
    else:
        data = torch.empty(sharded.shape, dtype=sharded.dtype, device=param.roles.device)
    mesh, placements = sharded.device_mesh, sharded.placements

    def rows(whole: torch.Tensor, dtype: torch.dtype) -> DTensor:
        whole = whole.to(param.roles.device, dtype)
        if rank0_only:  # torch 2.13 cannot scatter a dim that two axes shard, so all ranks get the whole tensor
            whole = local_tensor(distribute_tensor(whole.contiguous(), mesh, [Replicate()] * mesh.ndim))
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    local_tensor(sharded).copy_(local_tensor(rows(data, sharded.dtype)))
    if not with_grads or current is None:
        return
    if current.grad is None:
        sharded.grad = None
    elif sharded.grad is None:
        sharded.grad = rows(current.grad, sharded.grad_dtype or sharded.dtype)
    else:
        local_tensor(sharded.grad).copy_(local_tensor(rows(current.grad, sharded.grad.dtype)))
