"""Reductions in flight that several roots share. Layer: extras."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from fsdp2.module import FSDPModule
from fsdp2.runtime import hooks
from fsdp2.runtime.reduction import InFlight
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit
from fsdp2.settings import unit_in

_shared: WeakKeyDictionary[Unit, InFlight] = WeakKeyDictionary()  # by root


class _Shared(InFlight):
    """The largest limit of its users applies."""

    def __init__(self) -> None:
        super().__init__()
        self._limits: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def limit(self, user: object, max_reductions: int) -> None:
        self._limits[user] = max_reductions
        super().limit(user, max(self._limits.values()))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots share their reductions: the last backward of one of them finishes those of all, and
    `set_reduce_scatter_max_input_buffers` counts them together. For models that run in parts, such as pipeline stages.
    Communication streams belong to the device and are always shared. Raises `ArgumentError` if a module is not
    sharded."""
    units = [unit_in("share_comm_ctx", module) for module in modules]
    shared = _Shared()
    for unit in units:
        _shared[unit] = shared
        if unit.step is not None and unit.step.root() is unit:
            unit.step.reductions.finish_all()
            unit.step.reductions = shared


def _follow_root(step: Step) -> None:
    step.reductions = _shared.get(step.units[0], step.reductions)


hooks.root_made.append(_follow_root)
