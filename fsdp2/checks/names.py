"""Names that `fully_shard` adds to a module must not hide the module's own. Layer: checks, above api."""

from collections.abc import Sequence

import torch.distributed.fsdp
from torch import nn

from fsdp2._torch import parameter_slots
from fsdp2.api import Draft
from fsdp2.errors import ArgumentError
from fsdp2.module import FSDPModule
from fsdp2.settings import Settings

_GIVEN = frozenset(
    name
    for cls in (FSDPModule, Settings, torch.distributed.fsdp.FSDPModule)
    for name in vars(cls)
    if name not in ("_apply", "zero_grad") and not name.startswith("__")
)


def _check_names(module: nn.Module) -> None:
    """Check that no name that `fully_shard` adds to `module` hides one of the module's own.

    `_apply`, `zero_grad` and Python's special methods are exempt, because ours call the model's.

    Raises:
        ArgumentError: the class of `module`, or a base class, has a method or an attribute with such a name, or the
            module has an attribute, a parameter, a buffer or a submodule with such a name.
    """
    bases = [
        base for base in type(module).__mro__ if base not in (object, nn.Module, torch.distributed.fsdp.FSDPModule)
    ]
    submodules, buffers = module.named_children(), module.named_buffers(recurse=False)
    own = {*vars(module), *parameter_slots(module), *(name for name, _ in (*submodules, *buffers))}
    for name in sorted(_GIVEN & own.union(*map(vars, bases))):
        owner = next((base.__qualname__ for base in bases if name in vars(base)), f"this {type(module).__qualname__}")
        raise ArgumentError(
            f"fully_shard: a sharded module has a method '{name}', which would hide the '{name}' of {owner}. Rename "
            "that in the model."
        )


def check_drafts(drafts: Sequence[Draft]) -> None:
    """Check the modules of all units that `fully_shard` will make."""
    for draft in drafts:
        for module in draft.modules:
            _check_names(module)
