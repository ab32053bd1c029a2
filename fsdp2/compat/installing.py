"""`install` and `uninstall`: replace torch's objects by ours, and restore them. Layer: compat.

fsdp2 imports nothing private below `torch.distributed.fsdp`, because its implementation must not depend on torch's.
Replacing a name is different: it must be replaced wherever it is read, also in private modules of torch. So this module
goes through `sys.modules`. No private name is replaced: what clients access through a private path either works with
torch's own objects, or is an attribute of our objects.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from threading import RLock
from types import ModuleType
from typing import Any

import torch.distributed.fsdp
from torch import nn

from fsdp2 import api, policies
from fsdp2 import module as modules
from fsdp2.compat.views import state_view
from fsdp2.errors import OrderError
from fsdp2.extras import finalization, forward_methods, host_memory, shared_reductions, spmd
from fsdp2.module import FSDPModule

__all__ = ["HOME", "IMPLEMENTATION", "PUBLIC", "fully_shard", "install", "is_installed", "uninstall"]

# The module from which client code imports FSDP2.
HOME = "torch.distributed.fsdp"

# The FSDP2 names that it exports. Names that the installed torch lacks are skipped.
_POLICIES = ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy")
_HANDLES = ("FSDPModule", "GradientReductionHandle", "UnshardHandle")
PUBLIC = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx", *_HANDLES, *_POLICIES)

# torch's FSDP2 itself, which continues to work with its own objects.
IMPLEMENTATION = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.replicate_with_fsdp")

# Attributes that torch's `fully_shard` sets on every module it manages. Dynamo reads both; transformers reads the
# first, to keep ranks together in `generate`.
_MARKS = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True}

_lock = RLock()
_torchs: dict[str, Any] = {}  # while installed: torch's object for each public name
_get_fsdp_state = vars(FSDPModule)["_get_fsdp_state"]  # the method while not installed
_torch_fully_shard: Any = torch.distributed.fsdp.fully_shard


@wraps(api.fully_shard)
def fully_shard(module: Any, **kwargs: Any) -> Any:
    """See `fsdp2.fully_shard`. Like torch's, it also sets marks on all modules below, and a state, for clients."""
    sharded = api.fully_shard(module, **kwargs)
    for root in [module] if isinstance(module, nn.Module) else module:
        state_view(root)
        for each in root.modules():
            each.__dict__.update(_MARKS)
    return sharded


fully_shard.state = _torch_fully_shard.state  # type: ignore[attr-defined]  # it finds what `state_view` leaves
fully_shard.__module__ = __name__  # where pickle finds it


def is_installed() -> bool:
    """Whether torch's FSDP2 names currently resolve to ours."""
    return bool(_torchs)


def install() -> None:
    """Let the FSDP2 names of `torch.distributed.fsdp` resolve to fsdp2's, in this process, until `uninstall`.

    Call it on every rank, before anything imports these names. A second call does nothing. No communication.

    Raises:
        OrderError: a module outside of torch has already imported one of the names; the message says which. In this
            case nothing is changed.

    Example::

        import fsdp2.compat

        fsdp2.compat.install()
        from torch.distributed.fsdp import fully_shard  # fsdp2's
    """
    with _lock:
        if _torchs:
            return
        home = vars(sys.modules[HOME])
        ours = _ours()
        torchs = {name: home[name] for name in ours if name in home}
        _check_in_time(torchs)
        _exchange(torchs, ours)
        FSDPModule._get_fsdp_state = state_view  # type: ignore[assignment,method-assign]
        _torchs.update(torchs)


def uninstall() -> None:
    """Restore torch's names. Does nothing if not installed.

    Modules outside of torch that imported a name in the meantime keep ours. Sharded modules stay sharded.
    """
    with _lock:
        _exchange(_ours(), dict(_torchs))
        FSDPModule._get_fsdp_state = _get_fsdp_state  # type: ignore[method-assign]
        _torchs.clear()


def _ours() -> dict[str, Any]:
    """Our object for each name."""
    homes: dict[str, Any] = {"fully_shard": fully_shard}
    for home in (policies, modules, finalization, forward_methods, host_memory, shared_reductions, spmd):
        homes |= {name: vars(home)[name] for name in PUBLIC if name in vars(home)}
    return {name: homes[name] for name in PUBLIC}


def _exchange(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Replace the old object of each name by the new one in all modules of torch that hold it."""
    for module, attribute, name in list(_holders(old, _is_torchs)):
        if name in new:
            setattr(module, attribute, new[name])


def _check_in_time(torchs: Mapping[str, Any]) -> None:
    late = _holders(torchs, lambda name: not (_is_torchs(name) or name.startswith(("fsdp2.", *IMPLEMENTATION))))
    places = ", ".join(f"{module.__name__}.{attribute}" for module, attribute, _ in late)
    if places:
        raise OrderError(
            f"fsdp2.compat.install: too late: {places} is torch's object already. Install before "
            f"anything imports from {HOME}: make `import fsdp2.compat.auto` the first line of the program, or run it "
            "with `python -m fsdp2.compat`."
        )


def _is_torchs(name: str) -> bool:
    """Whether a module is part of torch, but not of its FSDP2."""
    return name.split(".")[0] == "torch" and not name.startswith(IMPLEMENTATION)


def _holders(objects: Mapping[str, Any], of: Callable[[str], bool]) -> Iterator[tuple[ModuleType, str, str]]:
    """The modules that have one of `objects` (by name) as a global: module, name of the global, name of the object.
    `of` selects modules by name."""
    names = {id(each): name for name, each in objects.items()}
    selected = {id(module): module for name, module in list(sys.modules.items()) if of(name)}  # some have two names
    for module in selected.values():
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                yield module, attribute, names[id(value)]
