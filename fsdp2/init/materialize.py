"""`materialize`: give memory and values to a sharded model on the meta device, in one call. Layer: init.

::

    allocate        every parameter and buffer on the meta device gets memory; the rest stays as it is
    initialise      by the user's function, `init_weights`, or each module's `reset_parameters`
    check           tensors that got memory but no values are an error, so garbage is never trained
    synchronise     replicas get the values of the first replica, buffers those of the first rank
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from fsdp2._torch import local_tensor, version
from fsdp2.checks.emptied import mark
from fsdp2.errors import ArgumentError, FSDPError
from fsdp2.init.allocation import is_unwritten, is_written_less
from fsdp2.init.seeded import Mode, seeded
from fsdp2.mesh import MeshRoles
from fsdp2.placement.allocation import Fresh, allocate, tensors_of
from fsdp2.runtime.root import units_below
from fsdp2.runtime.unit import Unit

__all__ = ["materialize"]

# Methods that (re)initialise a module's own values. torch's attention and Transformer have only the second name.
RESETS = ("reset_parameters", "_reset_parameters", "reset_buffers")

# Advice if the methods of modules are not enough.
OTHERWISE = (
    "Pass a function that makes the values (init=), load them (fsdp2.checkpoint.load), or build the model on a real "
    "device and shard that."
)


def materialize(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    *,
    seed: int | None = None,
    mode: Mode = "sequential",
    device: torch.device | str | None = None,
) -> None:
    """Give memory and values to a model that was sharded on the meta device. Every rank must call it, after the last
    `fully_shard`. Parameters keep their identity, so the optimizer may be created before (except one that creates its
    state in its constructor, such as Adagrad).

    Values do not depend on the number of ranks (see `seeded`). With replicas, the first replica's values are broadcast
    over the replicate axis, one broadcast per parameter; buffers are broadcast to all ranks. Tensors that are not on
    the meta device keep their values.

    Args:
        model: the root module.
        init: a function that creates the values, called with `model` (``lambda model: model.apply(init_fn)``). None:
            the model's own ``init_weights()`` if it has one (transformers, torchtitan), otherwise `reset_parameters` of
            each module, children first. A module's `reset_buffers()` is called too, if it has one.
        seed: see `seeded`; None continues with the default generators, which must be in the same state on all ranks.
        mode: see `seeded`.
        device: the device of buffers, and of parameters that are not sharded. None: that of the units.

    Raises:
        ArgumentError: parameters or buffers got memory but no values; all are named. Usually these are non-persistent
            buffers: give their module a method ``reset_buffers()``. Or a module is parametrised, or its reset fails on
            sharded parameters; the message says which, and why. Or, without `init`, the model's own methods wrote to a
            parameter that already had values, for example from a checkpoint.

    Example::

        with torch.device("meta"):
            model = Model(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fsdp2.init.materialize(model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    units = units_below(model)
    home = torch.device(device) if device is not None else units[0].device if units else torch.device("cpu")
    had_values = {name: (param, version(param)) for name, param in model.named_parameters() if not param.is_meta}
    fresh = allocate(model, home)
    for each in fresh:
        mark(each.tensor)
    with seeded(seed, mode=mode), torch.no_grad():
        _initialise(model, init, fresh)
    _check_all_written(model, fresh, _roles(units))
    if init is None:
        _check_kept(had_values)
        if not _has_init_weights(model):
            _warn_of_replaced(model, fresh)
    for unit in units:
        unit.refresh_groups()
    with torch.no_grad():
        _synchronise(model, units)


def _has_init_weights(model: nn.Module) -> bool:
    return callable(getattr(model, "init_weights", None))


def _initialise(model: nn.Module, init: Callable[[nn.Module], object] | None, fresh: list[Fresh]) -> None:
    names = {module: name for name, module in model.named_modules()}
    if init is not None:
        init(model)
    elif _has_init_weights(model):
        own: Any = model
        _run(own.init_weights, f"{type(model).__name__}.init_weights()")
    else:
        touched = _touched(model, fresh)
        for module in (each for each in _children_first(model) if each in touched):
            name = next((one for one in RESETS[:2] if callable(getattr(module, one, None))), None)
            if name is not None:
                _check_plain(names[module], module)
                _run(getattr(module, name), f"{name}() of '{names[module]}' ({type(module).__name__})")
    for module in model.modules():
        reset: Any = getattr(module, RESETS[2], None)
        if callable(reset):
            _run(reset, f"{RESETS[2]}() of '{names[module]}' ({type(module).__name__})")


def _touched(model: nn.Module, fresh: list[Fresh]) -> set[nn.Module]:
    """The modules that contain, directly or below, a tensor that was given memory. Other modules keep their values."""
    got = {each.tensor for each in fresh}
    prefixes: set[str] = set()
    for name, tensor in tensors_of(model, every_name=True):
        if tensor in got:
            parts = name.split(".")
            prefixes.update(".".join(parts[:length]) for length in range(len(parts)))
    return {module for name, module in model.named_modules(remove_duplicate=False) if name in prefixes}


def _check_plain(name: str, module: nn.Module) -> None:
    """Raise for a parametrised module: its reset would write to a tensor computed from its parameters, and be lost. The
    computation may not even run on shards (torch's weight norm divides by zero if one is empty)."""
    if is_parametrized(module):
        parametrizations: Any = module.parametrizations
        kinds = ", ".join(
            f"{weight}: {', '.join(type(p).__name__ for p in ps)}" for weight, ps in parametrizations.items()
        )
        raise ArgumentError(
            f"materialize: '{name}' ({type(module).__name__}) is parametrised ({kinds}), so that its reset_parameters "
            f"does not reach its parameters. {OTHERWISE}"
        )


def _run(function: Callable[[], object], what: str) -> None:
    """Call a method of the model that initialises values.

    Raises:
        ArgumentError: it fails on sharded parameters.
    """
    try:
        function()
    except FSDPError:
        raise
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"materialize: {what} fails on parameters that are sharded: {reason}. {OTHERWISE}"
        ) from error


def _children_first(module: nn.Module) -> Iterable[nn.Module]:
    """All modules in the order in which their constructors end, so that a module's changes to its children come after
    theirs."""
    seen: dict[nn.Module, None] = {}

    def visit(each: nn.Module) -> None:
        for child in each.children():
            if child not in seen:
                visit(child)
        seen[each] = None

    visit(module)
    return seen


def _check_all_written(model: nn.Module, fresh: list[Fresh], roles: MeshRoles | None) -> None:
    """Raise on all ranks if tensors have no values. (Some ranks cannot see this in their shards.)"""
    now = dict(tensors_of(model))
    persistent = set(model.state_dict())
    unwritten = {
        each.name for each in fresh if now.get(each.name) is each.tensor and is_unwritten(each) and each.tensor.numel()
    }
    flags = torch.tensor([name in unwritten for name in now], dtype=torch.int32, device=roles.device if roles else None)
    for group in _groups(roles):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    garbage = [name for name, flag in zip(now, flags.tolist(), strict=True) if flag]
    if garbage:
        shown = [name if name in persistent else f"{name} (not persistent)" for name in garbage]
        raise ArgumentError(
            f"materialize: these were allocated and not initialised: {', '.join(shown)}. Pass a function "
            "that initialises them (init=), or give their modules a method reset_parameters() or reset_buffers()."
        )


def _check_kept(had_values: dict[str, tuple[nn.Parameter, int]]) -> None:
    """Raise if parameters that had values, for example from a checkpoint, were initialised with the others."""
    lost = [name for name, (param, writes) in had_values.items() if version(param) != writes]
    if lost:
        raise ArgumentError(
            f"materialize: these were not on the meta device, and the model's own methods have overwritten them: "
            f"{', '.join(lost)}. Pass a function that initialises only what is still missing (init=)."
        )


def _warn_of_replaced(model: nn.Module, fresh: list[Fresh]) -> None:
    """Warn about modules that the model initialised again after their constructors: `reset_parameters` does not repeat
    that. Writes on the meta device leave no values but are counted. Resets written by the model's author are not
    reported: they may do everything, or may have been called twice."""
    modules: dict[str, None] = {}
    for each in fresh:
        owner = model.get_submodule(each.name.rpartition(".")[0])
        reset: Any = getattr(type(owner), RESETS[0], None) or getattr(type(owner), RESETS[1], None)
        if is_written_less(each) and getattr(reset, "__module__", "").startswith("torch."):
            modules[f"{each.name.rpartition('.')[0]} ({type(owner).__name__})"] = None
    if modules:
        some = ", ".join(list(modules)[:10]) + (f", ... ({len(modules)} in all)" if len(modules) > 10 else "")
        warnings.warn(
            f"materialize: {some}: the model's constructor initialises these once more, after their own constructors. "
            f"They have the values of their reset_parameters now, not the model's. {OTHERWISE}",
            stacklevel=3,
        )


def _synchronise(model: nn.Module, units: list[Unit]) -> None:
    """One broadcast per parameter over its replicate axis, and per buffer."""
    for unit in units:
        for param in unit.params:
            group = param.roles.replicate_group
            if group is not None and param.roles.replicate_size > 1 and param.geometry.outer is None:
                _broadcast(local_tensor(param.sharded), group, unit.device)
    roles = _roles(units)
    for group in _groups(roles):
        for _, buffer in model.named_buffers():
            if not isinstance(buffer, DTensor) and roles is not None:
                _broadcast(buffer, group, roles.device)


def _roles(units: list[Unit]) -> MeshRoles | None:
    return next((param.roles for unit in units for param in unit.params), None)


def _groups(roles: MeshRoles | None) -> list[dist.ProcessGroup]:
    """The groups over which, one after the other, all ranks agree."""
    both = () if roles is None else (roles.shard_group, roles.replicate_group)
    return [group for group in both if group is not None]


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast through `device`, the mesh's: offloaded tensors are in host memory, which NCCL cannot access."""
    dense = tensor.to(device).contiguous()
    dist.broadcast(dense, group=group, group_src=0)
    if dense is not tensor:
        tensor.copy_(dense)
