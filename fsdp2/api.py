"""`fully_shard`: check everything, then group, build and swap. A call that raises leaves the module as it was.
Layer: api."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, Unpack, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch import is_replicated, parameter_slots
from fsdp2.arguments import PlacementFn, Placing, chosen_features, parameter_set, to_precision_policy, unfit
from fsdp2.errors import ArgumentError, MisuseError, OrderError
from fsdp2.mesh import MeshRoles, default_mesh, roles_of
from fsdp2.module import FSDPModule, swapped_class
from fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy, UnitSettings
from fsdp2.runtime import hooks
from fsdp2.runtime.forward import attach
from fsdp2.runtime.parameter import ManagedParameter, Plan, managed_by
from fsdp2.runtime.slot import Slot, SlotTable
from fsdp2.runtime.state_dict import guard_state_dict, owner_of, owners_of
from fsdp2.runtime.unit import Unit, has_forward, unit_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Places = dict[nn.Parameter, tuple[str, list[Slot]]]  # parameters, with their first names and all slots
_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Options(TypedDict, total=False):
    """The keyword arguments of `fully_shard`, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: object
    zero: object
    optional: object


@overload
def fully_shard(module: nn.Module, **options: Unpack[Options]) -> FSDPModule: ...
@overload
def fully_shard(module: list[AnyModule], **options: Unpack[Options]) -> list[FSDPModule]: ...
@overload
def fully_shard(module: Sequence[nn.Module], **options: Unpack[Options]) -> Sequence[FSDPModule]: ...
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    zero: Any = None,
    optional: object = False,
) -> Any:
    """Shard the parameters of `module` over a mesh. It becomes one unit, whose parameters are communicated together.

    The unit manages all parameters below `module` except those that an earlier call on a submodule manages, so call it
    bottom-up: on each block and then on the whole model. Every rank of the mesh must call it on the same modules in the
    same order. Nothing is communicated: each rank keeps its own rows of the values that it has. Parameters are replaced
    by DTensors; create optimizers afterwards, or see `fsdp2.optim`. A weight that is tied to a weight of an earlier
    unit stays one parameter, which the earlier unit manages with its policies. Returns `module`, the same object.

    Args:
        module: a module with a `forward`, or a list of modules that form one unit (for example, modules that share a
            weight). Its class is swapped: afterwards it is an `FSDPModule`.
        mesh: 1-D: parameters are sharded over it (FSDP). 2-D with names: replicated over the first axis and sharded
            over the second (HSDP). None: all ranks. Parameters and buffers move to its device, except meta tensors.
            Parameters may be DTensors (tensor parallelism) on other axes of the mesh from which `mesh` was sliced.
        reshard_after_forward: True frees unsharded parameters after forward and gathers them again for backward. False
            keeps them. An int reshards to groups of that many ranks; it must divide the size of the shard axis. None:
            False for the root, True for others.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)``, a `ShardPlacementResult` with a separate
            mesh for the parameter, or None for ``Shard(0)``. Uneven sizes are allowed on every dim. Scalars are
            replicated.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps sharded parameters, gradients and optimizer state in host memory;
            `Offload` keeps some of them there, or in files.
        ignored_params: parameters that are not sharded, moved or reduced.
        dp_mesh_dims: a `DataParallelMeshDims` names the data-parallel axes of `mesh`. All parameters must be DTensors
            on that whole mesh. With replicate axes only, nothing is sharded.
        zero: a `ZeroPolicy`: the stage of ZeRO, that is, what is sharded and when.
        optional: True, or an `OptionalPolicy` with details, if some ranks may not run `module` in a forward. This
            applies to the units below `module` too. Not for the root.

    Raises:
        ArgumentError: the mesh, an argument or a parameter is unsuitable; the message names it.
        MisuseError: a module is already sharded, or appears twice in the list; or a 2-D mesh has no names.
        OrderError: a module that contains this one was sharded earlier, together with its parameters.
        UnsupportedError: the options cannot be combined.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Source: PyTorch FSDP, https://arxiv.org/abs/2304.11277; the interface is that of torch.distributed.fsdp.fully_shard.
    """
    modules = _check_modules(module)
    if not isinstance(mesh, (DeviceMesh, type(None))):
        raise unfit("mesh", "a DeviceMesh or None", mesh, 'Make one: init_device_mesh("cuda", (world_size,)).')
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise unfit("shard_placement_fn", "a function of a parameter, or None", shard_placement_fn)
    precision, ignored = to_precision_policy(mp_policy), parameter_set(ignored_params)
    offload = None if type(offload_policy) is OffloadPolicy else offload_policy
    features = chosen_features(optional=optional, zero=zero, dp_mesh_dims=dp_mesh_dims, offload_policy=offload)
    zero, dims = features.pop("zero", None), features.pop("dp_mesh_dims", None)
    offload = features.pop("offload_policy", _NO_OFFLOAD)
    mesh = mesh if zero is None else zero.mesh(mesh)
    mesh = default_mesh() if mesh is None else mesh
    roles = roles_of(mesh) if dims is None else dims.roles(mesh)
    roles = roles if zero is None else zero.roles(roles)
    reshard_to = reshard_after_forward if zero is None else zero.reshard_after_forward(reshard_after_forward)
    if not isinstance(reshard_to, (bool, type(None))):
        check = hooks.implementation(hooks.options, "reshard_after_forward", f"reshard_after_forward={reshard_to!r}")
        reshard_to = check((reshard_to, roles))
    placing = Placing(roles, shard_placement_fn, precision, offload, reshard_to, zero)
    apart = [each for _, each in _managed_modules(modules) if any(needs(each) for needs in hooks.needs_own_unit)]
    others = [each for each in modules if each not in apart]
    lists = [*([each] for each in apart), *([others] if others else [])]
    drafts = [_draft(each, apart, placing, ignored) for each in lists]
    for check in hooks.units_drafted:
        check(drafts)
    for hook in hooks.params_ignored:
        hook(ignored)
    settings = UnitSettings(reshard_after_forward=reshard_to, zero=zero, features=features)
    for draft in drafts:
        _build(draft, settings)
    return module


fully_shard.state = unit_of  # type: ignore[attr-defined]  # the unit of a module, or None


@dataclass(frozen=True)
class Draft:
    """A unit that has been checked but not yet created.

    Attributes:
        managed: the modules whose parameters it will manage, with names.
        planned, tied: the parameters in `places` that it owns; those that other units own, with names and slots here.
        smaller: for each `MeshRoles`, those of the smaller mesh to reshard to after forward, if there is one.
    """

    placing: Placing
    modules: list[nn.Module]
    managed: list[tuple[str, nn.Module]]
    places: Places
    planned: deque[tuple[nn.Parameter, Plan]]
    tied: list[tuple[str, list[Slot], ManagedParameter]]
    smaller: dict[MeshRoles, MeshRoles]


def _draft(modules: list[nn.Module], apart: Collection[nn.Module], placing: Placing, ignored: set[Any]) -> Draft:
    managed = list(_managed_modules(modules, apart))
    places = _parameter_slots(managed, ignored)
    _check_order(places)
    planned: list[tuple[nn.Parameter, Plan]] = []
    tied: list[tuple[str, list[Slot], ManagedParameter]] = []
    for param, (fqn, slots) in places.items():
        plan, known = placing.plan(fqn, param), managed_by(param)
        if known is None or known.unsharded is param:
            planned.append((param, plan))
            continue
        if known.roles != plan.roles:
            raise ArgumentError(
                f"'{fqn}' is tied to '{known.fqn}', which is sharded on {known.roles.mesh}; it cannot also be on "
                f"{plan.roles.mesh}. Use the same mesh for both."
            )
        tied.append((fqn, slots, known))
    offloads = placing.offload.of_params([param.nbytes for param, _ in planned])
    plans = deque((param, replace(plan, offload=each)) for (param, plan), each in zip(planned, offloads, strict=True))
    for each in modules:
        swapped_class(type(each))  # may raise
    return Draft(placing, modules, managed, places, plans, tied, {})


def _build(draft: Draft, settings: UnitSettings) -> None:
    placing, modules, planned, zero = draft.placing, draft.modules, draft.planned, settings.zero
    device = placing.roles.device
    groups: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    while planned:
        param, plan = planned.popleft()
        fqn, slots = draft.places.pop(param)  # so that a parameter's whole data is freed as soon as it is sharded
        keep = zero is not None and not param.requires_grad and zero.keep_frozen
        data = placing.local(param)  # the values, where the sharded parameter will live
        data = data if data.is_meta else data.to(plan.home)
        new = ManagedParameter(slots, fqn, param, data, plan)
        for seen in hooks.param_sharded:
            seen(new, data)
        del data
        groups.setdefault((keep, plan.roles, plan.offload, plan.gather_dtype), []).append(new)
    for _, module in draft.managed:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)  # the same object: it may have other names
    unit = Unit(modules, list(groups.values()), device, placing.policy, settings)
    for group, (keep, *_) in zip(unit.groups, groups, strict=True):
        group.smaller, group.keep = None if keep == "host" else draft.smaller.get(group.roles), keep
    for _, slots, tied in draft.tied:
        _share(slots, tied, unit)
    for module in modules:
        module.__class__ = swapped_class(type(module))
        attach(module, unit)
    for owner in {slot.module for param in unit.params for slot in param.slots}:
        if owner is not None:
            guard_state_dict(owner, unit)
    for hook in hooks.unit_made:
        hook(unit)


def _check_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    is_list = isinstance(module, (list, tuple))
    modules: list[Any] = list(module) if is_list else [module]  # type: ignore[arg-type]
    if not modules:
        raise ArgumentError("fully_shard: expected at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ArgumentError(f"fully_shard: expected an nn.Module, got {type(each)}")
        name = type(each).__name__
        if not is_list and isinstance(each, _CONTAINERS) and not has_forward(each):
            of_modules = isinstance(each, (nn.ModuleList, nn.ModuleDict))
            instead = "its elements, or on a list of them" if of_modules else "the module that computes with them"
            raise ArgumentError(
                f"fully_shard: {name} has no forward, so its parameters would never be gathered; call fully_shard on "
                f"{instead}"
            )
        if unit_of(each) is not None:
            raise MisuseError(f"fully_shard: this {name} is sharded already; call it only once per module")
    if len(set(modules)) != len(modules):
        raise MisuseError("fully_shard: a module appears twice in the list")
    return modules


def _check_order(places: Places) -> None:
    """Raise if a parameter already belongs to the unit of a module above this one."""
    for param, (fqn, slots) in places.items():
        for unit in {unit for slot in slots if slot.module is not None for unit in owners_of(slot.module)}:
            for known in unit.params:
                if known.is_among({id(param)}):
                    of = ", ".join(type(each).__name__ for each in unit.modules)
                    raise OrderError(
                        f"fully_shard: '{fqn}' is sharded already, as '{known.fqn}' of the {of}. Call fully_shard on a "
                        "module before you call it on one that contains it."
                    )


def _share(slots: list[Slot], param: ManagedParameter, unit: Unit) -> None:
    """Let these slots hold a parameter of another unit, and `unit` gather it."""
    owner, group = owner_of(param)
    form = param.slots[0].get()
    assert isinstance(form, nn.Parameter)
    for slot in slots:
        slot.put(form)
        assert slot.module is not None
        guard_state_dict(slot.module, owner)
    param.slots += slots
    group.seen.slots = SlotTable(group.params)
    if group not in unit.borrowed:
        unit.borrowed.append(group)


def _managed_modules(
    modules: Sequence[nn.Module], apart: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The modules and their submodules, with names. Skips modules of other units, replicated ones, and submodules that
    are in `apart`."""
    seen: set[nn.Module] = set()
    roots = set(modules)
    for root in modules:
        stack = [("", root)]
        while stack:
            prefix, module = stack.pop()
            is_others = module not in roots and (unit_of(module) is not None or module in apart)
            if module in seen or is_others or is_replicated(module):
                continue
            seen.add(module)
            yield prefix, module
            children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
            stack.extend(reversed(children))


def _parameter_slots(managed: Sequence[tuple[str, nn.Module]], ignored: set[nn.Parameter]) -> Places:
    slots: Places = {}
    for prefix, module in managed:
        for name, param in parameter_slots(module).items():
            if param is not None and param not in ignored:
                fqn = f"{prefix}.{name}" if prefix else name
                slots.setdefault(param, (fqn, []))[1].append(Slot(module, name))
    return slots
