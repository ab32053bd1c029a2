"""Walk over the tensors of a forward's inputs and outputs. Layer: runtime.

Containers are lists, tuples, named tuples, dicts and their subclasses, and dataclass instances. A container is copied
only if a tensor in it changes. Other objects and mappings (a cache, a distribution) are never copied; `tensors_within`
finds the tensors that they hold.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import repeat
from operator import is_, methodcaller, setitem
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor replaced by ``fn(tensor)``."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if all(map(is_, items, value)):
            return value
        kind: Any = type(value)  # a named tuple takes fields one by one, a torch.return_types one a sequence
        return getattr(kind, "_make", kind)(items)
    put: Callable[[Any, Any, Any], None]
    if isinstance(value, dict):
        parts, put = value, setitem
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        put = object.__setattr__  # also of frozen ones
    else:
        return value
    changed = {key: new for key, old in parts.items() if (new := map_tensors(fn, old)) is not old}
    result = copy.copy(value) if changed else value
    for key, new in changed.items():
        put(result, key, new)
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of `value`, in the order in which `map_tensors` visits them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is tuple and all(map(isinstance, value, repeat(torch.Tensor))):
        return list(value)
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(visit, value)
    return found


def tensors_within(value: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of `value`: those that `map_tensors` visits, and those within other mappings and objects."""
    direct: list[torch.Tensor] = []
    inner: list[torch.Tensor] = []
    parts_of_objects: list[Any] = []
    seen: dict[int, Any] = {}  # objects may refer to each other
    for found, waiting in ((direct, [value]), (inner, parts_of_objects)):
        while waiting:
            item = waiting.pop()
            if isinstance(item, torch.Tensor):
                found.append(item)
                continue
            parts, is_container = _parts_of(type(item))  # type: ignore[arg-type]  # a type is hashable
            if parts is not None and id(item) not in seen:
                seen[id(item)] = item
                (waiting if is_container else parts_of_objects).extend(parts(item))
    return direct, inner


_CLOSED = (type, Enum, nn.Module, ModuleType, FunctionType, MethodType)  # not searched


@lru_cache(maxsize=1024)
def _parts_of(kind: type) -> tuple[Callable[[Any], Iterable[Any]] | None, bool]:
    """A function that lists the parts of an instance of `kind` (None if it has none), and whether `map_tensors` handles
    `kind`."""
    if issubclass(kind, (list, tuple)):
        return iter, True
    if issubclass(kind, Mapping):
        return methodcaller("values"), issubclass(kind, dict)
    members = [item for base in kind.__mro__ for item in vars(base).items()]
    slots = [name for name, each in members if isinstance(each, MemberDescriptorType)]
    has_dict = kind.__dictoffset__ != 0
    if issubclass(kind, _CLOSED) or kind.__module__ == "builtins" or not (slots or has_dict):
        return None, True

    def attributes(value: Any) -> list[Any]:
        return [*(vars(value).values() if has_dict else ()), *(getattr(value, name, None) for name in slots)]

    return attributes, dataclasses.is_dataclass(kind)
