"""The hooks of modules for state dicts: these see shards. Layer: runtime, top."""

import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fsdp2.runtime.param_group import ParamGroup
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.unit import Unit

# torch's message when a whole tensor is loaded into a sharded one, and our replacement. torch collects such messages in
# a list that it passes to pre-load hooks but not to post-load hooks.
_PLAIN_INTO_SHARDED = re.compile(
    r'While copying the parameter named "(.+?)".*dimensions in the checkpoint are torch\.Size\(\[(.*?)\]\).*'
    r"got mixed torch\.Tensor and DTensor",
    re.DOTALL,
)
_LOAD_WHOLE = (
    "It got mixed torch.Tensor and DTensor. Load a state dict of whole tensors with torch.distributed.checkpoint."
    "state_dict.set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True)), or within "
    "fsdp2.full_params(model)."
)
_errors_of_loads: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
_OWNERS = "_fsdp2_owners"  # on a module that holds parameters: the units that manage them


def guard_state_dict(module: nn.Module, unit: Unit) -> None:
    """Reshard `unit`, whose parameters `module` holds, before a state dict is made or loaded."""
    owners = module.__dict__.get(_OWNERS)
    if owners is not None:
        if unit not in owners:
            owners.append(unit)
        return
    module.__dict__[_OWNERS] = [unit]
    module.register_state_dict_pre_hook(_before_save)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_refresh)


def owners_of(module: nn.Module) -> Sequence[Unit]:
    """The units that manage parameters which `module` itself holds."""
    owners: Sequence[Unit] = module.__dict__.get(_OWNERS, ())
    return owners


def owner_of(param: ManagedParameter) -> tuple[Unit, ParamGroup]:
    """The unit and the group that manage `param`."""
    for slot in param.slots:
        for unit in owners_of(slot.module) if slot.module is not None else ():
            for group in unit.groups:
                if param in group.params:
                    return unit, group
    raise AssertionError(f"{param.fqn} belongs to no unit")


def _before_save(module: nn.Module, *_: Any) -> None:
    for unit in owners_of(module):
        unit.check_unconverted()
        unit.reshard_all(to_change=False)


def _before_load(
    module: nn.Module,
    _state: Any,
    _prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: Any,
    _extra: Any,
    errors: list[str],
) -> None:
    _errors_of_loads[module] = errors
    for unit in owners_of(module):
        unit.reshard_all()


def _refresh(module: nn.Module, *_: Any) -> None:
    errors = _errors_of_loads.pop(module, [])
    for index, text in enumerate(errors):
        found = _PLAIN_INTO_SHARDED.match(text)
        if found:
            errors[index] = f"'{found[1]}' is sharded, and the state dict has a plain tensor of shape ({found[2]})."
            if _LOAD_WHOLE not in errors:
                errors.append(_LOAD_WHOLE)
    for unit in owners_of(module):
        unit.refresh_groups()
