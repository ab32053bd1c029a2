"""`install` and `uninstall`: replace torch's objects by ours, and restore them. Layer: compat."""

from collections.abc import Mapping
from threading import RLock
from typing import Any

from fsdp2.compat import clients
from fsdp2.compat.names import HOME
from fsdp2.compat.replacements import public_replacements
from fsdp2.compat.torch_modules import holders, is_fsdp2s_own, is_torchs_own, loaded
from fsdp2.compat.views import state_view
from fsdp2.errors import OrderError
from fsdp2.module import FSDPModule

__all__ = ["install", "is_installed", "uninstall"]

_lock = RLock()
_torchs: dict[str, Any] = {}  # while installed: torch's object for each public name
_get_fsdp_state = vars(FSDPModule)["_get_fsdp_state"]  # the method while not installed


def is_installed() -> bool:
    """Whether torch's FSDP2 names resolve to ours now."""
    return bool(_torchs)


def install() -> None:
    """Make the FSDP2 names of `torch.distributed.fsdp` those of fsdp2, in this process, until `uninstall`.

    Call it on every rank, before anything imports these names. Installing twice is the same as once. No communication.

    Raises:
        OrderError: a module outside of torch has already imported one of the names; the message says which. Nothing is
            changed then.
        UnsupportedError: a client that was told to shard is too old to use FSDP2 (also raised later, by its own
            import). If it was not told to shard, a warning. The message says which version does.

    Example::

        import fsdp2.compat

        fsdp2.compat.install()
        from torch.distributed.fsdp import fully_shard  # fsdp2's
    """
    with _lock:
        if _torchs:
            return
        home = vars(loaded(HOME))
        ours = public_replacements()
        torchs = {name: home[name] for name in ours if name in home}
        _check_in_time(torchs)
        clients.check_loaded()
        _exchange(torchs, ours)
        FSDPModule._get_fsdp_state = state_view  # type: ignore[assignment,method-assign]
        clients.watch()
        _torchs.update(torchs)


def uninstall() -> None:
    """Restore torch's names. Does nothing if not installed.

    Modules that imported a name meanwhile keep ours, unless they belong to torch. Sharded modules stay sharded.
    """
    with _lock:
        clients.unwatch()
        _exchange(public_replacements(), dict(_torchs))
        FSDPModule._get_fsdp_state = _get_fsdp_state  # type: ignore[method-assign]
        _torchs.clear()


def _exchange(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Replace the old object of each name by the new one in all modules of torch that hold it."""
    for holder in list(holders(old, is_torchs_own)):
        if holder.name in new:
            setattr(holder.module, holder.attribute, new[holder.name])


def _check_in_time(torchs: Mapping[str, Any]) -> None:
    late = list(holders(torchs, lambda name: not is_torchs_own(name) and not is_fsdp2s_own(name)))
    if late:
        raise OrderError(
            f"fsdp2.compat.install: too late: {', '.join(map(str, late))} is torch's object already. Install before "
            f"anything imports from {HOME}: make `import fsdp2.compat.auto` the first line of the program, or run it "
            "with `python -m fsdp2.compat`."
        )
