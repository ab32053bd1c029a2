"""Which calls are running. Layer: runtime, ground.

If a forward starts while its unit is already in a forward, it is either nested (a net that calls itself, an adapter
that calls the whole model) or the earlier forward raised. Only the call stack tells which.
"""

import inspect
from types import CodeType, FrameType
from typing import Any

from torch import nn

_entries: set[CodeType] = {nn.Module.__call__.__code__}  # functions whose `self` is the module that runs


def note_entry(function: Any) -> None:
    """Register `function` as another function that runs the module `self`."""
    _entries.add(function.__code__)


def is_running(module: nn.Module) -> bool:
    """Whether a call of `module` is running."""
    return _has_calls(module, 1)


def is_within_itself(module: nn.Module) -> bool:
    """Whether the call of `module` that is starting is nested in another call of it."""
    return _has_calls(module, 2)


def _has_calls(module: nn.Module, wanted: int) -> bool:
    frame: FrameType | None = inspect.currentframe()
    num_calls = 0
    while frame is not None and num_calls < wanted:
        if frame.f_code in _entries and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls == wanted
