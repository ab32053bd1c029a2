"""Walk over the tensors of a forward's inputs and outputs. Layer: runtime.

Containers: list, tuple, named tuple, dict and their subclasses, dataclass instances. A container without changed
tensors is passed on as the same object; otherwise a copy is made and the caller's object is not modified.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor replaced by ``fn(tensor)``."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and type(value) is not tuple:
            # A named tuple takes its fields one by one, a torch.return_types one takes a sequence.
            kind: Any = type(value)
            return kind._make(items) if getattr(kind, "_make", None) else kind(items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(fn, old)) is not old}
        if not changed:
            return value
        result = copy.copy(value)
        for key, new in changed.items():
            result[key] = new
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = map_tensors(fn, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # also for frozen dataclasses
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of `value`, in the order in which `map_tensors` meets them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        return list(value)
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(visit, value)
    return found
