"""Which calls are running. Layer: runtime, ground.

If a forward starts while its unit is already in a forward, it is either nested (a net that calls itself, an adapter
that calls the whole model) or the earlier forward raised. Only the call stack tells which.
"""

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

from torch import nn

_entries: set[CodeType] = {nn.Module.__call__.__code__}  # functions whose `self` is the module that runs


def note_entry(function: Any) -> None:
    """Register `function` as another function that runs the module `self`."""
    _entries.add(function.__code__)


def is_running(module: nn.Module) -> bool:
    """Whether a call of `module` is running, in any thread: the end of a backward runs in a thread of the device, while
    the one that has called it waits."""
    return any(_has_calls(frame, module, 1) for frame in sys._current_frames().values())


def is_within_itself(module: nn.Module) -> bool:
    """Whether the call of `module` that is starting is nested in another call of it."""
    return _has_calls(inspect.currentframe(), module, 2)


def _has_calls(frame: FrameType | None, module: nn.Module, wanted: int) -> bool:
    num_calls = 0
    while frame is not None and num_calls < wanted:
        if frame.f_code in _entries and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls == wanted
