"""Adds advice to torch's error for a whole tensor that is loaded into a sharded parameter. Layer: checks."""

import re
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

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
_watched: WeakSet[nn.Module] = WeakSet()
_errors_of_loads: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def watch_loads(unit: Unit) -> None:
    """Watch loads into the modules that hold parameters of `unit`."""
    modules = [slot.module for group in unit.groups for param in group.params for slot in param.slots]
    for module in dict.fromkeys(modules):
        if module is not None and module not in _watched:
            _watched.add(module)
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)


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


def _after_load(module: nn.Module, *_: Any) -> None:
    errors = _errors_of_loads.pop(module, [])
    for index, text in enumerate(errors):
        found = _PLAIN_INTO_SHARDED.match(text)
        if found:
            errors[index] = f"'{found[1]}' is sharded, and the state dict has a plain tensor of shape ({found[2]})."
            if _LOAD_WHOLE not in errors:
                errors.append(_LOAD_WHOLE)
