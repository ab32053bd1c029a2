"""What the runtime did, in order: for tests, for `logging`, and for the tools above the runtime. Ground layer.

The runtime calls `emit` at each step of a unit's life. Nobody listening costs one function call. `record` collects the
events of a stretch of code; with the logger ``fsdp2`` at DEBUG level every event is also a log line.

In a trace of `torch.profiler` the phases are ranges, under the names that torch's FSDP2 gives them
(``FSDP::all_gather (layers.0)``): `profiled` and `profiler_range`, which only look at a flag where no profiler runs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.profiler import record_function

from fsdp2._torch import profiler_is_on

__all__ = ["Event", "emit", "profiled", "profiler_range", "record"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger("fsdp2")
_listeners: list[list["Event"]] = []


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the runtime.

    Attributes:
        kind: ``unshard``, ``reshard`` (the parameters really change form); ``all_gather``, ``reduce_scatter``,
            ``all_reduce`` (communication is issued); ``pre_forward``, ``post_forward``, ``pre_backward``,
            ``post_backward`` (a unit's hooks ran); ``root_pre_forward``, ``root_post_backward`` (an iteration's ends).
        unit: FQN of the unit, ``""`` for the root, several modules joined by ``", "``.
        numel: elements of a collective: the gathered output over all ranks, the reduce-scatter's output on this rank,
            or the all-reduced tensor; padding included.
        nbytes: the same in bytes, in the dtype on the wire.
        dtype: dtype on the wire (None when several travel together).
        group_size: ranks that take part.
    """

    kind: str
    unit: str
    numel: int = 0
    nbytes: int = 0
    dtype: torch.dtype | None = None
    group_size: int = 0

    def __str__(self) -> str:
        text = f"{self.kind} {self.unit or '(root)'}"
        if self.group_size:
            text += f" numel={self.numel} dtype={self.dtype} ranks={self.group_size}"
        return text


def emit(
    kind: str, unit: str, numel: int = 0, nbytes: int = 0, dtype: torch.dtype | None = None, group_size: int = 0
) -> None:
    """Tell everyone who listens that this step happens now."""
    if _listeners or _log.isEnabledFor(logging.DEBUG):
        event = Event(kind, unit, numel, nbytes, dtype, group_size)
        for listener in _listeners:
            listener.append(event)
        _log.debug("%s", event)


@contextmanager
def record() -> Iterator[list[Event]]:
    """Collect the events of all threads of this process while the block runs.

    Example::

        with events.record() as log:
            model(x).sum().backward()
        print(sum(e.kind == "all_gather" for e in log))
    """
    listener: list[Event] = []
    _listeners.append(listener)
    try:
        yield listener
    finally:
        # By identity: two recordings may hold equal lists.
        _listeners[:] = [other for other in _listeners if other is not listener]


class Named(Protocol):
    """What `profiled` methods belong to: units and param groups."""

    fqn: str


Owner = TypeVar("Owner", bound=Named)
_NO_RANGE = nullcontext()


def profiler_range(name: str, fqn: str = "") -> AbstractContextManager[object]:
    """A range of the profiler around a block: ``name (fqn)``; with a name that ends in "for", ``name fqn``."""
    if not profiler_is_on():
        return _NO_RANGE
    if name.endswith(" for"):
        return record_function(f"{name} {fqn}")
    return record_function(f"{name} ({fqn})" if fqn else name)


def profiled(
    name: str,
) -> Callable[[Callable[Concatenate[Owner, Arguments], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Let a method be a range of the profiler, with the `fqn` of its object."""

    def decorate(
        method: Callable[Concatenate[Owner, Arguments], Result],
    ) -> Callable[Concatenate[Owner, Arguments], Result]:
        @wraps(method)
        def ranged(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not profiler_is_on():
                return method(self, *args, **kwargs)
            with profiler_range(name, self.fqn):
                return method(self, *args, **kwargs)

        return ranged

    return decorate
