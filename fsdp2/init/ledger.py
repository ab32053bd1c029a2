"""`Ledger`: maps the parameters of a model, sharded or not, to the recorded ones. Layer: init.

Sharding replaces parameters, so when the recording ends the ledger lists every parameter of every module that was
built, by object (`fully_shard` knows what replaced it) and by place (which stays the same if another tool, such as
tensor parallelism, has replaced the object before).
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp2._torch import parameter_slots, version
from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.init.tape import Tape, Window
from fsdp2.runtime.parameter import ManagedParameter, managed_by
from fsdp2.runtime.slot import Slot

__all__ = ["Ledger", "ModuleWatch", "Recorded"]


class ModuleWatch(AbstractContextManager["ModuleWatch"]):
    """Within this context, collects every module that registers something, or is registered.

    Attributes:
        modules: these modules, once each.
    """

    def __init__(self) -> None:
        self.modules: dict[nn.Module, None] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> "ModuleWatch":
        def note(module: nn.Module, name: str, value: Any) -> None:
            self.modules[module] = None
            if isinstance(value, nn.Module):
                self.modules[value] = None

        for register in (
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
        ):
            self._hooks.callback(register(note).remove)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hooks.close()


@dataclass(frozen=True)
class Recorded:
    """A parameter as it was when the recording ended.

    Attributes:
        param: the stand-in; kept alive, so that `managed_by` knows what replaced it.
        fqn: one of its names, relative to the module through which it was found.
        window: where its values are on the tape.
        version: its version counter at that time.
    """

    param: nn.Parameter
    fqn: str
    window: Window
    version: int

    def check(self, fqn: str, shape: tuple[int, ...]) -> Window:
        """The window, for a parameter that is now called `fqn` and has `shape`.

        Raises:
            OrderError: the stand-in was changed by something that is not on the tape.
            ArgumentError: the shape has changed.
        """
        if version(self.param) != self.version:
            raise OrderError(
                f"deferred: '{fqn}' was changed in place after the recording had ended, while it had no values. Change "
                "it within the context, or after replay."
            )
        if tuple(self.window.shape) != shape:
            raise ArgumentError(
                f"replay: '{fqn}' was recorded with shape {tuple(self.window.shape)}, but has shape {shape} now; "
                "change the model within the context"
            )
        return self.window


class Ledger:
    """All recorded parameters.

    Attributes:
        has_replayed: whether a model was filled from them.

    Args:
        tape: the tape of the recording.
        modules: the modules that were built; their submodules are included.

    Raises:
        UnsupportedError: a parameter was distributed or sharded within the context.
    """

    def __init__(self, tape: Tape, modules: Iterable[nn.Module]):
        self.has_replayed = False
        self._by_param: dict[torch.Tensor, Recorded] = {}
        self._by_place: WeakKeyDictionary[nn.Module, dict[str, Recorded]] = WeakKeyDictionary()
        for top in sorted(modules, key=lambda module: -sum(1 for _ in module.modules())):  # to find the longest names
            for prefix, module in top.named_modules():
                if module in self._by_place:
                    continue
                self._by_place[module] = {}
                for name, param in parameter_slots(module).items():
                    if param is not None:
                        self._note(tape, module, name, f"{prefix}.{name}" if prefix else name, param)

    def _note(self, tape: Tape, module: nn.Module, name: str, fqn: str, param: nn.Parameter) -> None:
        if isinstance(param, DTensor):
            raise UnsupportedError(
                f"deferred: '{fqn}' was distributed or sharded within the context; call parallelize_module and "
                "fully_shard after it"
            )
        window = tape.window_of(param)
        if window is not None:
            recorded = self._by_param.setdefault(param, Recorded(param, fqn, window, version(param)))
            self._by_place[module][name] = recorded

    def get(self, param: torch.Tensor) -> Recorded | None:
        """The entry of a parameter that was not replaced; None for others."""
        return self._by_param.get(param)

    def managed(self) -> dict[ManagedParameter, Recorded]:
        """The entries of the parameters that units manage now."""
        pairs = ((managed_by(param), recorded) for param, recorded in self._by_param.items())
        return {managed: recorded for managed, recorded in pairs if managed is not None}

    def knows(self, slots: Iterable[Slot]) -> bool:
        """Whether a recorded parameter was at one of these places."""
        return any(slot.name in self._by_place.get(slot.module, {}) for slot in slots if slot.module is not None)

    def at(self, slots: Iterable[Slot]) -> Recorded | None:
        """The entry of the parameter that was at these places, if a tool has replaced it without a trace.

        Raises:
            ArgumentError: these places had different parameters.
        """
        found: dict[Window, Recorded] = {}
        for slot in slots:
            module = slot.module
            recorded = None if module is None else self._by_place.get(module, {}).get(slot.name)
            if recorded is not None and managed_by(recorded.param) is None:
                found.setdefault(recorded.window, recorded)
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise ArgumentError(
                f"replay: '{one.fqn}' and '{other.fqn}' were different parameters when the recording ended, and are "
                "one now; tie weights within the context"
            )
        return next(iter(found.values()), None)
