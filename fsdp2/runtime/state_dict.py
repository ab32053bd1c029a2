"""Module hooks that make state dicts see the shards. Layer: runtime, top."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.unit import Unit

_OWNERS = "_fsdp2_owners"  # on a module that holds parameters: the units that manage them


def guard_state_dict(module: nn.Module, unit: Unit) -> None:
    """Reshard `unit`, whose parameters `module` holds, whenever a state dict is made or loaded."""
    owners = module.__dict__.setdefault(_OWNERS, [])
    if not owners:
        module.register_state_dict_pre_hook(_before_save)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_refresh)
    if unit not in owners:
        owners.append(unit)


def owners_of(module: nn.Module) -> Sequence[Unit]:
    """The units that manage parameters which `module` itself holds."""
    owners: Sequence[Unit] = module.__dict__.get(_OWNERS, ())
    return owners


def owner_of(param: ManagedParameter) -> tuple[Unit, Bucket]:
    """The unit and the group that manage `param`."""
    for slot in param.slots:
        for unit in owners_of(slot.module) if slot.module is not None else ():
            for group in unit.groups:
                if param in group.params:
                    return unit, group
    raise AssertionError(f"{param.fqn} belongs to no unit")


def _before_save(module: nn.Module, *_: Any) -> None:
    for unit in owners_of(module):
        for group in unit.groups:
            if group.phase is Phase.UNSHARDED:
                group.changes.check_unconverted()
        unit.reshard_all(to_change=False)


def _before_load(module: nn.Module, *_: Any) -> None:
    for unit in owners_of(module):
        unit.reshard_all()


def _refresh(module: nn.Module, *_: Any) -> None:
    for unit in owners_of(module):
        unit.refresh_groups()
