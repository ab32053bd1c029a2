"""Where a unit is in its forward and backward. Layer: runtime, ground.

::

    IDLE      --forward.pre_forward-->     FORWARD    unshard, wait, prefetch, cast inputs
    FORWARD   --forward.post_forward-->    IDLE       cast outputs, hook their backward, reshard
    IDLE      --backward.pre_backward-->   BACKWARD   unshard, wait, prefetch
    BACKWARD  --backward.post_backward-->  DONE       reshard, reduce the remaining gradients
    DONE      --end of backward-->         IDLE

A forward inside backward is the recomputation of an activation checkpoint. It leaves the parameters unsharded for the
backward that follows. So does a forward nested in another one of the same unit: the outer one still needs them.
"""

import inspect
from enum import Enum
from types import CodeType
from typing import Any

from torch import nn

from fsdp2.policies import UnitSettings


class Stage(Enum):
    """Where a unit is in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"  # also after a forward that raised, until the next one
    BACKWARD = "backward"
    DONE = "done"  # its backward ran; this backward pass may reach it again


class Stays(Enum):
    """What a reshard may leave for the next unshard, if the source of a group can keep it."""

    NOTHING = "the sharded parameters alone"
    PART = "part of the values, such as the shards of a replica: the shards will not change before"
    SMALLER = "PART, and the rows in a smaller mesh"
    VALUES = "memory and values, in case the shards do not change"


class State:
    """What the hooks of a unit pass on to later ones.

    Attributes:
        stage: where the unit is.
        calls: one entry for each running call of its modules, the outermost first: `sys.exception()` when the call
            began. If it is different at the end, the call has raised.
        to_run: for a unit of several modules: the ids of those that this forward has not run yet.
        was_whole: it was unsharded before the running forward.
        sees_end: the last forward had inputs that need gradients.
        first_node: `next_node_number()` at the beginning of the last forward.
        settings: for the running backward.
    """

    __slots__ = ("calls", "first_node", "sees_end", "settings", "stage", "to_run", "was_whole")

    def __init__(self, settings: UnitSettings) -> None:
        self.stage = Stage.IDLE
        self.calls: list[BaseException | None] = []
        self.to_run: set[int] = set()
        self.was_whole = False
        self.sees_end = False
        self.first_node = 0
        self.settings = settings


# Code of functions that call the module `self`.
entries: set[CodeType] = {nn.Module.__call__.__code__}


def is_running(unit: Any, times: int = 1) -> bool:
    """Whether this thread is in `times` calls of modules of `unit`, by the call stack. Only used where `State.calls`
    may be wrong: torch calls no hooks after a `KeyboardInterrupt`, or an error in compiled code."""
    frame = inspect.currentframe()
    while frame is not None and times:
        if frame.f_code in entries and vars(frame.f_locals["self"]).get("_fsdp2_unit") is unit:
            times -= 1
        frame = frame.f_back
    return not times
