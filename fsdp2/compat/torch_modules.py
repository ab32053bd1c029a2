"""The one file that looks into modules that are not ours. Layer: compat.

fsdp2 imports nothing private below `torch.distributed.fsdp`, because its own implementation must not lean on torch's.
Replacing a name is another matter: it has to be done wherever its readers look, and modules of torch that imported it
are among them, private or not. So this file goes through `sys.modules`. It imports nothing and calls nothing there.
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
    """A module that has one of the objects that were asked for, as `attribute`; `name` is what it is called at home."""

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
    """Whether a module belongs to either implementation of FSDP2, which know both."""
    return name.split(".")[0] == "fsdp2" or name.startswith(IMPLEMENTATION)


def holders(objects: Mapping[str, Any], of: Callable[[str], bool]) -> Iterator[Holder]:
    """Where one of `objects` (by name) is a global of a module; `of` chooses the modules by their names."""
    names = {id(each): name for name, each in objects.items()}
    seen = set()
    for module_name, module in list(sys.modules.items()):
        if id(module) in seen or not of(module_name):
            continue
        seen.add(id(module))  # `__main__` may have two names
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                yield Holder(module, attribute, names[id(value)])
