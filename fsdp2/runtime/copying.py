"""`copy.deepcopy` of sharded modules: for EMA, teachers, snapshots. Layer: runtime, top.

A copy is a sharded module like its original: on the same mesh, with shards, units and hooks of its own. No
communication. `deepcopy` copies modules from the outside in and knows nothing of units, so a unit's copy begins empty
(`Unit.__deepcopy__`) and is filled each time one of its modules has been copied.
"""

import copy
from typing import Any

from torch import nn

from fsdp2.runtime.attach import owner_of
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.slot import Slot
from fsdp2.runtime.unit import Unit, unit_of

__all__ = ["copy_module"]


def copy_module(module: nn.Module, original_class: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `module`, of the same (swapped) class, without gradients. Reshards it first."""
    unit = unit_of(module)
    assert unit is not None
    unit.reshard_all()
    for group in (*unit.groups, *unit.borrowed):
        for param in group.params:
            if id(param.sharded) not in memo:
                memo[id(param.sharded)] = param.clone_sharded()
    copied: nn.Module = original_class.__new__(original_class)
    memo[id(module)] = copied
    for key, value in module.__dict__.items():
        copied.__dict__[key] = copy.deepcopy(value, memo)
    copied.__class__ = type(module)
    _fill(unit, memo)
    _borrow(unit, memo)
    return copied


def _fill(old: Unit, memo: dict[int, Any]) -> None:
    """Give the copy of a unit what `old` manages, as far as it has been copied."""
    new: Unit = memo[id(old)]
    param_lists = [[_copied(param, memo) for param in group.params] for group in old.groups]
    kept = [
        (group, [param for param in params if param.slots])
        for group, params in zip(old.groups, param_lists, strict=True)
        if any(param.slots for param in params)
    ]
    new.adopt([memo[id(module)] for module in old.modules if id(module) in memo], [params for _, params in kept])
    for (old_group, _), new_group in zip(kept, new.groups, strict=True):
        new_group.smaller, new_group.keep = old_group.smaller, old_group.keep
        memo[id(old_group)] = new_group


def _borrow(old: Unit, memo: dict[int, Any]) -> None:
    """Groups of other units that `old` uses too: their copies have names in this unit's copy as well."""
    new: Unit = memo[id(old)]
    new.borrowed = []
    for group in old.borrowed:
        owner, _ = owner_of(group.params[0])
        if id(owner) in memo:
            _fill(owner, memo)
            new.borrowed.append(memo[id(group)])


def _copied(param: ManagedParameter, memo: dict[int, Any]) -> ManagedParameter:
    slots = []
    for slot in param.slots:
        module = slot.module
        if module is not None and id(module) in memo:
            slots.append(Slot(memo[id(module)], slot.name))
    return param.copy_with(slots, memo[id(param.sharded)])
