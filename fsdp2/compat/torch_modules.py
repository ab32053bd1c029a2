"""The only file that looks into modules that are not ours. Layer: compat.

fsdp2 imports nothing private below `torch.distributed.fsdp`, because its implementation must not depend on torch's.
Replacing a name is different: it must be replaced wherever it is read, and that includes modules of torch that imported
it, private or not. So this file goes through `sys.modules`. It imports nothing and calls nothing there.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fsdp2.compat.names import IMPLEMENTATION

__all__ = ["Holder", "holders", "is_fsdp2s_own", "is_torchs_own", "loaded"]


@dataclass(frozen=True)
class Holder:
    """A module that has one of the requested objects as `attribute`; `name` is the object's name in its own module."""

    module: ModuleType
    attribute: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.attribute}"


def loaded(name: str) -> ModuleType | None:
    """The module of this name, None if it has not been imported."""
    return sys.modules.get(name)


def is_torchs_own(name: str) -> bool:
    """Whether a module is part of torch, but not of its FSDP2."""
    return name.split(".")[0] == "torch" and not name.startswith(IMPLEMENTATION)


def is_fsdp2s_own(name: str) -> bool:
    """Whether a module belongs to one of the two implementations of FSDP2, which know both."""
    return name.split(".")[0] == "fsdp2" or name.startswith(IMPLEMENTATION)


def holders(objects: Mapping[str, Any], of: Callable[[str], bool]) -> Iterator[Holder]:
    """The modules with one of `objects` (by name) among their globals; `of` selects modules by name."""
    names = {id(each): name for name, each in objects.items()}
    seen = set()
    for module_name, module in list(sys.modules.items()):
        if id(module) in seen or not of(module_name):
            continue
        seen.add(id(module))  # `__main__` may have two names
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                yield Holder(module, attribute, names[id(value)])
