"""`fully_shard`: validate, group, build, swap. Layer: api.

Everything is checked before anything is changed, so that a call that raises leaves the module as it was.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2._torch import composable_apis, parameter_slots
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.mesh import MeshRoles, ShardPlacementResult, default_mesh, roles_of
from fsdp2.module import swapped_class
from fsdp2.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, UnitSettings
from fsdp2.runtime.parameter import ManagedParameter, Slot
from fsdp2.runtime.root import pre_forward
from fsdp2.runtime.unit import Unit, has_forward, unit_of

__all__ = ["fully_shard"]

Modules = TypeVar("Modules", nn.Module, Sequence[nn.Module])
_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Modules:
    """Shard the parameters of `module` over a mesh; it becomes one unit, whose parameters communicate together.

    The unit manages all parameters below `module` but those that an earlier call on a submodule manages; so call it
    bottom-up, on each block and then on the whole model. Every rank of the mesh calls it on the same modules in the
    same order. No communication of parameters: each rank keeps its rows of what it has. Parameters are replaced by
    DTensors; make optimizers afterwards.

    Args:
        module: a module with a `forward`, or a list of modules that form one unit (say, those that share a weight).
            Its class is swapped: it is an `FSDPModule` afterwards.
        mesh: 1-D: parameters are sharded over it (FSDP). 2-D with names: replicated over the first axis and sharded
            over the second (HSDP). None: all ranks. Parameters and buffers move to its device, but for meta tensors.
        reshard_after_forward: True gives unsharded parameters back after forward and gathers them again for backward.
            False keeps them. An int reshards to groups of that many ranks, which must divide the shard axis. None:
            False for the root, True for others.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)``, a `ShardPlacementResult` with a mesh
            of the parameter's own, or None for ``Shard(0)``. Uneven sizes are allowed on every dim.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: only the default is supported by this version.
        ignored_params: left alone: not sharded, moved or reduced.
        dp_mesh_dims: not supported by this version.

    Returns:
        `module`, the same object.

    Raises:
        ArgumentError: the mesh, an argument or a parameter is unfit; the message names it.
        MisuseError: a module is sharded already, or twice in the list.
        UnsupportedError: see above; or a parameter is not contiguous, or is a DTensor.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Source: PyTorch FSDP, https://arxiv.org/abs/2304.11277; the interface is that of torch.distributed.fsdp.fully_shard.
    """
    modules = _check_modules(module)
    _check_policies(offload_policy, dp_mesh_dims)
    roles = roles_of(default_mesh() if mesh is None else mesh)
    reshard_to = _check_reshard(reshard_after_forward, roles)
    managed = list(_managed_modules(modules))
    slots = _parameter_slots(managed, ignored_params or set())
    placed: deque[tuple[nn.Parameter, int, MeshRoles]] = deque()
    for param, (fqn, _) in slots.items():
        dim, param_roles = _placement(param, fqn, shard_placement_fn, roles)
        placed.append((param, dim, param_roles))

    smaller = {each: _smaller(each, reshard_to) for _, _, each in placed}
    classes = [swapped_class(type(each)) for each in modules]

    settings = UnitSettings(reshard_after_forward=reshard_to)
    groups: dict[MeshRoles, list[ManagedParameter]] = {}
    while placed:
        param, dim, param_roles = placed.popleft()
        fqn, places = slots.pop(param)  # so that a parameter's whole data is freed as soon as it is sharded
        data = _to_device(param, param_roles.device)
        groups.setdefault(param_roles, []).append(
            ManagedParameter(places, fqn, param, data, param_roles, dim, mp_policy)
        )
    _move_buffers(managed, roles.device)
    unit = Unit(modules, list(groups.values()), roles.device, mp_policy, settings)
    for group in unit.groups:
        group.smaller = smaller[group.roles]
    for each, cls in zip(modules, classes, strict=True):
        each.__class__ = cls
        _attach(each, unit)
    return module


def _state(module: nn.Module) -> Unit | None:
    """The unit that manages `module`, None for one that is not sharded; ``fully_shard.state(module)``."""
    return unit_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    is_list = isinstance(module, (list, tuple))
    modules: list[Any] = list(module) if is_list else [module]  # type: ignore[arg-type]
    if not modules:
        raise ArgumentError("fully_shard: expected at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ArgumentError(f"fully_shard: expected an nn.Module, got {type(each)}")
        if not is_list and isinstance(each, (nn.ModuleList, nn.ModuleDict)) and not has_forward(each):
            raise ArgumentError(
                f"fully_shard: {type(each).__name__} has no forward, so its parameters would never be gathered; call "
                "fully_shard on its elements, or on a list of them"
            )
        if unit_of(each) is not None:
            raise MisuseError(f"fully_shard: this {type(each).__name__} is sharded already; call it once a module")
    if len({id(each) for each in modules}) != len(modules):
        raise MisuseError("fully_shard: a module stands twice in the list")
    return modules


def _check_policies(offload_policy: OffloadPolicy, dp_mesh_dims: DataParallelMeshDims | None) -> None:
    if isinstance(offload_policy, CPUOffloadPolicy) or type(offload_policy).__name__ == "CPUOffloadPolicy":
        raise UnsupportedError("fully_shard: CPUOffloadPolicy is not supported by this version of fsdp2")
    if dp_mesh_dims is not None:
        raise UnsupportedError("fully_shard: dp_mesh_dims is not supported by this version of fsdp2")


def _check_reshard(value: bool | int | None, roles: MeshRoles) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ArgumentError(f"reshard_after_forward: expected a bool, an int or None, got {value!r}")
    if value < 1 or roles.shard_size % value != 0:
        raise ArgumentError(
            f"reshard_after_forward: expected a divisor of the shard axis' size {roles.shard_size}, got {value}"
        )
    if value == 1:
        warn("reshard_after_forward=1 keeps parameters unsharded, as False does; pass False", stacklevel=3)
        return False
    return True if value == roles.shard_size else value


def _smaller(roles: MeshRoles, reshard_to: bool | int | None) -> MeshRoles | None:
    """The mesh to reshard to after forward; a parameter's own mesh must allow it too."""
    if reshard_to is None or isinstance(reshard_to, bool):
        return None
    if roles.shard_size % reshard_to != 0:
        raise ArgumentError(
            f"reshard_after_forward={reshard_to} does not divide the shard axis of a parameter's own mesh: {roles.mesh}"
        )
    return roles.smaller(reshard_to)


def _placement(
    param: nn.Parameter, fqn: str, placement_fn: PlacementFn | None, roles: MeshRoles
) -> tuple[int, MeshRoles]:
    """The dim to shard and the mesh of one parameter."""
    result: Any = placement_fn(param) if placement_fn is not None else None
    if isinstance(result, ShardPlacementResult):
        if result.mesh is not None:
            roles = roles_of(result.mesh)
        result = result.placement
    if result is None:
        result = Shard(0)
    if not isinstance(result, Shard):
        raise ArgumentError(
            f"shard_placement_fn: expected a Shard, a ShardPlacementResult or None for '{fqn}', got {result!r}"
        )
    if isinstance(param, DTensor):
        raise UnsupportedError(
            f"'{fqn}' is a DTensor with placements {param.placements}: tensor-parallel parameters are not supported by "
            "this version of fsdp2"
        )
    if param.ndim == 0:
        raise ArgumentError(f"'{fqn}' is a scalar, which cannot be sharded; make it a tensor of shape (1,)")
    if not param.is_contiguous():
        raise UnsupportedError(
            f"'{fqn}' is not contiguous: shape {tuple(param.shape)}, stride {param.stride()}; call .contiguous() on it"
        )
    dim = result.dim + param.ndim if result.dim < 0 else result.dim
    if not 0 <= dim < param.ndim:
        raise MisuseError(
            f"shard_placement_fn: Shard({result.dim}) for '{fqn}', which has {param.ndim} dims: {tuple(param.shape)}"
        )
    return dim, roles


# --- what the unit manages --------------------------------------------------------------------------------------------


def _managed_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules and those below, with names; neither into modules of another unit nor into replicated ones."""
    seen: set[nn.Module] = set()
    roots = set(modules)
    for root in modules:
        stack = [("", root)]
        while stack:
            prefix, module = stack.pop()
            if module in seen or (module not in roots and unit_of(module) is not None):
                continue
            if "replicate" in composable_apis(module):
                continue
            seen.add(module)
            yield prefix, module
            children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
            stack.extend(reversed(children))


def _parameter_slots(
    managed: Sequence[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, list[Slot]]]:
    """Every parameter once, with its first name and all places that hold it."""
    slots: dict[nn.Parameter, tuple[str, list[Slot]]] = {}
    for prefix, module in managed:
        for name, param in parameter_slots(module).items():
            if param is not None and param not in ignored:
                fqn = f"{prefix}.{name}" if prefix else name
                slots.setdefault(param, (fqn, []))[1].append(Slot(module, name))
    return slots


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().to(device)


def _move_buffers(managed: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in managed:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)  # the same object: it may have other names


# --- attaching --------------------------------------------------------------------------------------------------------


def _attach(module: nn.Module, unit: Unit) -> None:
    """Hook forward and the state dict."""
    module.__dict__["_fsdp2_unit"] = unit
    module.register_forward_pre_hook(partial(pre_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.post_forward)
    owners = {slot.module for param in unit.params for slot in param.slots} if module is unit.modules[0] else set()
    for owner in owners:
        if owner is not None:
            owner.register_state_dict_pre_hook(lambda *_: unit.reshard())
            owner.register_load_state_dict_pre_hook(lambda *_: unit.reshard())
            owner.register_load_state_dict_post_hook(lambda *_: unit.refresh_groups())
