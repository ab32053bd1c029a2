"""The root: the unit of a module tree whose forward runs first. Layer: runtime, top.

Before that forward, units are independent; a unit that is unsharded early has its own provisional step. Afterwards all
units share one step, and their names are relative to the root.
"""

from dataclasses import replace

from torch import nn

from fsdp2.errors import OrderError
from fsdp2.runtime import hooks
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit, unit_of


def units_below(module: nn.Module) -> list[Unit]:
    """The units of `module` and its submodules, in the order of the module tree."""
    return list(dict.fromkeys(unit for each in module.modules() if (unit := unit_of(each)) is not None))


def become_root(root: Unit) -> Step:
    """Make `root` the root of all units below its module: names, checks, and one step for all.

    Raises:
        OrderError: the unit has several modules; a unit below is a root itself; parameters are on the meta device.
        ArgumentError: a weight belongs to two groups, or is managed under one name but not under another; replicas
            differ.
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
        if unit is not root and unit.step is not None and not unit.step.is_provisional:
            if unit.step.root() is not unit:
                raise OrderError(
                    f"'{', '.join(fqns)}' belongs to another root already, {_described(unit.step.root())}. A unit has "
                    f"only one, so models that share a trunk need a common root: put {_described(root)} and the other "
                    "root into one module, call fully_shard on that, and compute both outputs in its forward."
                )
            raise OrderError(
                f"'{', '.join(fqns)}' ran its forward before the module that contains it and became a root itself. Run "
                "the outermost sharded module's forward first; after that, inner modules may run alone. Call the "
                "module itself: model.forward(...) bypasses its hooks. So does a method such as generate, unless it is "
                "registered with register_fsdp_forward_method."
            )
        unit.fqn = ", ".join(fqns)
        for group in unit.groups:
            group.channel.fqn = unit.fqn
            group.gradients.forget_plans()
            for param in group.params:  # named by the first module that holds it
                slot = param.slots[0]
                prefix = "" if slot.module is None else module_fqns.get(slot.module, "")
                param.fqn = f"{prefix}.{slot.name}" if prefix else slot.name
    for check in hooks.units_named:
        check(units)
    for unit in units:
        for group in unit.groups:
            if not group.changing:
                group.seen.warn_of_assigned_data()
        unit.refresh()
        unit.role = None
    step = Step(units, root.device, is_provisional=False)
    for hook in hooks.root_made:
        hook(step)
    for unit in units:
        if unit.step is not None:
            unit.step.finish_reductions()
            if unit is root:
                step.post_optim_event = unit.step.post_optim_event
        unit.step = step
        if unit.settings.reshard_after_forward is None and unit is not root:
            unit.settings = replace(unit.settings, reshard_after_forward=True)
    return step


def _described(root: Unit | None) -> str:
    return "which is gone" if root is None else f"this {' '.join(type(each).__name__ for each in root.modules)}"
