"""An ordered record of what the runtime did, for tests, `logging` and tools. Ground layer.

The runtime calls `emit` at each step of a unit's life, which costs one function call if nothing listens. `record`
collects the events of a block of code; with the logger ``fsdp2`` at DEBUG level every event is also logged.

In a trace of `torch.profiler` the phases are ranges with the same names as in torch's FSDP2 (``FSDP::all_gather
(layers.0)``). `profiled` and `profiler_range` create them; without a profiler they only check a flag.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.profiler import record_function

from fsdp2._torch import profiler_is_on
from fsdp2.nothing import NOTHING

__all__ = ["Event", "emit", "profiled", "profiler_range", "record"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

log = logging.getLogger("fsdp2")
root_log = logging.getLogger()
listeners: list[list["Event"]] = []


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the runtime.

    Attributes:
        kind: ``unshard``, ``reshard`` (the parameters change form); ``all_gather``, ``reduce_scatter``, ``all_reduce``
            (communication is issued), each with ``_wait`` and ``_done`` behind it (the host begins and ends to wait for
            it; for that of an accelerator not long); ``agreement`` (the ranks tell each other about optional units);
            ``pre_forward``, ``post_forward``, ``pre_backward``, ``post_backward`` (a unit's hooks ran);
            ``root_pre_forward``, ``root_post_backward`` (an iteration's ends).
        unit: FQN of the unit, ``""`` for the root, several modules joined by ``", "``.
        numel: elements of a collective: the gathered output over all ranks, the reduce-scatter's output on this rank,
            or the all-reduced tensor; padding included.
        nbytes: the same in bytes, in the dtype on the wire.
        dtype: dtype on the wire (None if a collective carries several).
        group_size: ranks that take part.
        at: when, in seconds of `time.perf_counter`. Events that differ in this alone are equal.
    """

    kind: str
    unit: str
    numel: int = 0
    nbytes: int = 0
    dtype: torch.dtype | None = None
    group_size: int = 0
    at: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        text = f"{self.kind} {self.unit or '(root)'}"
        if self.group_size:
            text += f" numel={self.numel} dtype={self.dtype} ranks={self.group_size}"
        return text


def emit(
    kind: str, unit: str, numel: int = 0, nbytes: int = 0, dtype: torch.dtype | None = None, group_size: int = 0
) -> None:
    """Report this step to all listeners."""
    if listeners or (log.level or root_log.level) <= logging.DEBUG:  # `isEnabledFor` costs twice as much as all of this
        event = Event(kind, unit, numel, nbytes, dtype, group_size, perf_counter())
        for listener in listeners:
            listener.append(event)
        log.debug("%s", event)


@contextmanager
def record() -> Iterator[list[Event]]:
    """Collect the events of all threads of this process while the block runs.

    Example::

        with events.record() as log:
            model(x).sum().backward()
        print(sum(e.kind == "all_gather" for e in log))
    """
    listener: list[Event] = []
    listeners.append(listener)
    try:
        yield listener
    finally:
        # By identity: two recordings may hold equal lists.
        listeners[:] = [other for other in listeners if other is not listener]


class Named(Protocol):
    """An object with `profiled` methods: a unit or a param group."""

    @property
    def fqn(self) -> str:
        """FQN of the unit."""


Owner = TypeVar("Owner", bound=Named)


def profiler_range(name: str, fqn: str = "") -> AbstractContextManager[object]:
    """A range of the profiler around a block: ``name (fqn)``; with a name that ends in "for", ``name fqn``."""
    if not profiler_is_on():
        return NOTHING
    if name.endswith(" for"):
        return record_function(f"{name} {fqn}")
    return record_function(f"{name} ({fqn})" if fqn else name)


def profiled(
    name: str,
) -> Callable[[Callable[Concatenate[Owner, Arguments], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Make a method a range of the profiler, with the `fqn` of its object."""

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
