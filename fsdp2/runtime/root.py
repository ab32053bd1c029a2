"""Who is the root: the first unit to run a forward, of all units below its module. Layer: runtime, top.

Until then units know nothing of each other; a unit that is unsharded before has a provisional context of its own. From
then on they share one context, and their names are relative to the root.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp2.errors import OrderError
from fsdp2.runtime.context import Context
from fsdp2.runtime.naming import check_tied, name_parameters
from fsdp2.runtime.unit import Unit, unit_of

__all__ = ["become_root", "pre_forward", "units_below"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pre_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The forward pre-hook of a sharded module."""
    if unit.context is None or unit.context.is_provisional:
        become_root(unit)
    return unit.pre_forward(module, args, kwargs)


def units_below(module: nn.Module) -> list[Unit]:
    """The units of `module` and its submodules, in the order of the module tree."""
    units: list[Unit] = []
    for submodule in module.modules():
        unit = unit_of(submodule)
        if unit is not None and unit not in units:
            units.append(unit)
    return units


def become_root(root: Unit) -> None:
    """Make `root` the root of all units below its module: names, checks, and one context for all.

    Raises:
        OrderError: the unit has several modules; a unit below is a root itself; parameters are on the meta device.
        ArgumentError: one weight belongs to two groups, or is managed under one name and not under another.
    """
    modules = root.modules
    if len(modules) != 1:
        raise OrderError(
            f"fully_shard was called on a list of {len(modules)} modules, and one of them ran forward first; such a "
            "unit cannot be the root. Call fully_shard on the module that contains them, and run that one's forward."
        )
    module_fqns = {module: fqn for fqn, module in modules[0].named_modules()}
    units = units_below(modules[0])
    for unit in units:
        fqns = [module_fqns[module] for module in unit.modules if module in module_fqns]
        if unit is not root and unit.context is not None and not unit.context.is_provisional:
            raise OrderError(
                f"'{', '.join(fqns)}' ran its forward before the module that contains it and became a root itself. Run "
                "the outermost sharded module's forward first; after that, inner modules may run alone."
            )
        unit.fqn = ", ".join(fqns)
        for group in unit.groups:
            group.fqn = unit.fqn
            name_parameters(group.params, module_fqns)
    check_tied(modules[0], [param for unit in units for param in unit.params])
    for unit in units:
        unit.refresh()
    context = Context(units, root.device, is_provisional=False)
    for unit in units:
        if unit.context is not None:
            unit.context.free_released()
        unit.context = context
        if unit.settings.reshard_after_forward is None:
            unit.settings = replace(unit.settings, reshard_after_forward=unit is not root)
