"""`copy.copy` and `copy.deepcopy` of sharded modules: for EMA, teachers, snapshots. Layer: extras.

A copy is a sharded module on the same mesh, with its own shards, units and hooks. Copying does not communicate.
`deepcopy` copies modules from the outside in and knows nothing of units. So the copy of a unit starts empty, and is
filled whenever one of its modules has been copied.
"""

import copy
import copyreg
from functools import partial
from typing import Any

from torch import nn

from fsdp2._torch import local_tensor, make_parameter
from fsdp2.extras.kept import set_keep
from fsdp2.module import FSDPModule, original_class
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.slot import Slot
from fsdp2.runtime.state_dict import guard_state_dict, owner_of
from fsdp2.runtime.unit import Unit, unit_for

_COPIED_UNITS = object()  # its id is the key in `memo` for the units seen so far


def shallow_copy(module: nn.Module) -> nn.Module:
    """A second module object on the same parameters and units."""
    original = original_class(type(module))
    copied: nn.Module = original.__new__(original)
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_fsdp2_copy_of"] = module  # keeps it alive: its unit refers to it weakly
    copied.__class__ = type(module)
    return copied


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `module`, of the same (swapped) class, without gradients. Reshards it first."""
    unit = unit_for(module)
    unit.reshard_all(to_change=False)
    for group in (*unit.groups, *unit.borrowed):
        for param in group.params:
            if id(param.sharded) not in memo:
                memo[id(param.sharded)] = _cloned(param)
    original = original_class(type(module))
    copied: nn.Module = original.__new__(original)
    memo[id(module)] = copied
    for key, value in module.__dict__.items():
        copied.__dict__[key] = copy.deepcopy(value, memo)
    copied.__class__ = type(module)
    copied_units: list[Unit] = memo.setdefault(id(_COPIED_UNITS), [])
    copied_units.append(unit)
    for other in copied_units:
        # A borrowed group's parameters have names in the borrowing unit too.
        if other is unit or _lent(other, memo) or any(group in unit.groups for group in other.borrowed):
            _fill(other, memo)
    for other in copied_units:
        memo[id(other)].borrowed = [memo[id(group)] for group in _lent(other, memo)]
    for hook in hooks.unit_made:
        hook(memo[id(unit)])
    return copied


def _lent(unit: Unit, memo: dict[int, Any]) -> list[Bucket]:
    """The groups that `unit` borrows and whose owner is also copied."""
    owners = [(group, owner_of(group.params[0])[0]) for group in unit.borrowed]
    return [group for group, owner in owners if any(id(module) in memo for module in owner.modules)]


def _fill(old: Unit, memo: dict[int, Any]) -> None:
    """Fill the copy of `old` with its groups, as far as their modules have been copied, and with the borrowed groups
    whose owner has not been copied."""
    new: Unit = memo[id(old)]
    lent = _lent(old, memo)
    kept = []
    copies: dict[ManagedParameter, ManagedParameter] = {}
    for group in (*old.groups, *(group for group in old.borrowed if group not in lent)):
        params = [copies.setdefault(param, _copied(param, memo)) for param in group.params]
        if any(param.slots for param in params):
            kept.append((group, [param for param in params if param.slots]))
    new.adopt([memo[id(module)] for module in old.modules if id(module) in memo], [params for _, params in kept])
    for (old_group, _), new_group in zip(kept, new.groups, strict=True):
        follow_settings(new_group, old_group)
        memo[id(old_group)] = new_group
    for module in {slot.module for param in new.params for slot in param.slots}:
        if module is not None:
            guard_state_dict(module, new)
    for group in lent:
        _fill(owner_of(group.params[0])[0], memo)


def follow_settings(group: Bucket, other: Bucket) -> None:
    """Apply to `group` what was set for `other`, which has the same roles."""
    group.smaller = other.smaller
    set_keep(group, other.keep)
    own, theirs = group.channel, other.channel
    own.scatter_group, own.base, own.comm = theirs.scatter_group, theirs.base, theirs.comm
    group.gradients.make_plan = other.gradients.make_plan


def _copied(param: ManagedParameter, memo: dict[int, Any]) -> ManagedParameter:
    slots = []
    for slot in param.slots:
        module = slot.module
        if module is not None and id(module) in memo:
            slots.append(Slot(memo[id(module)], slot.name))
    copied = copy.copy(param)
    copied.slots, copied.sharded = slots, memo[id(param.sharded)]
    copied.unsharded = copied.whole = copied.resharded = None
    copied.flat = param.flat.new_empty(0)
    if slots:
        copied.refresh()
    return copied


def _cloned(param: ManagedParameter) -> nn.Parameter:
    """A sharded parameter with its own memory and no gradient."""
    sharded, local = param.sharded, local_tensor(param.sharded)
    local = local.clone() if is_wrapper(local) else param.geometry.local_view(param.flat.clone())
    copied = make_parameter(local, param.plan.specs.sharded(local.dtype), sharded.requires_grad)
    copied.__dict__.update(param.kind[1])
    if sharded.grad_dtype != sharded.dtype:
        copied.grad_dtype = sharded.grad_dtype
    return copied


def _emptied(unit: Unit) -> tuple[Any, tuple[()]]:
    """The constructor of an empty unit with the settings of `unit`, and its arguments."""
    return partial(Unit, [], [], unit.device, unit.policy, unit.settings), ()


copyreg.pickle(Unit, _emptied)  # for `deepcopy`
FSDPModule.__copy__ = shallow_copy
FSDPModule.__deepcopy__ = copy_module
