"""Events: what the runtime did, for tests, `logging`, tools and profilers. Ground layer.

`emit` reports to every `record` that is open and, at level DEBUG, to the logger ``fsdp2``. In a trace of
`torch.profiler` the phases are ranges with the names of torch's FSDP2, such as ``FSDP::all_gather (layers.0)``.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from fsdp2._torch import profiler_is_on
from fsdp2.nothing import NOTHING

_log = logging.getLogger("fsdp2")
_listeners: list[list["Event"]] = []


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the runtime.

    Attributes:
        kind: ``unshard``, ``reshard`` (the parameters change form); ``all_gather``, ``reduce_scatter``, ``all_reduce``
            (communication is issued); the same with ``_wait`` and ``_done`` appended (the host starts and stops waiting
            for it, which is short on an accelerator); ``agreement`` (ranks exchange which optional units they run);
            ``pre_forward``, ``post_forward``, ``pre_backward``, ``post_backward`` (a unit's hooks ran);
            ``root_pre_forward``, ``root_post_backward`` (an iteration starts and ends).
        unit: FQN of the unit; ``""`` for the root; for a unit of several modules, their FQNs joined by ``", "``.
        numel: elements of a collective: the gathered output over all ranks, the reduce-scatter's output on this rank,
            or the all-reduced tensor; padding included.
        nbytes: the same in bytes, in the dtype on the wire.
        dtype: dtype on the wire (None if a collective carries several).
        group_size: ranks that take part.
        at: time in seconds, from `time.perf_counter`. Ignored in comparisons of events.
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
        return f"{text} numel={self.numel} dtype={self.dtype} ranks={self.group_size}" if self.group_size else text


class _Emit:
    """Called with the first fields of an `Event`. Without listeners the call runs no Python code."""

    __call__: Any = staticmethod("".format)  # takes any arguments


emit = _Emit()


def _report(*fields: Any) -> None:
    event = Event(*fields, at=perf_counter())  # type: ignore[misc]  # `at` is never among them
    for listener in _listeners:
        listener.append(event)
    _log.debug("%s", event)


def follow_listeners() -> None:
    """Turn `emit` on or off: are there listeners now? A root's forward starts with this, to read the logger's level."""
    is_heard = _listeners or _log.isEnabledFor(logging.DEBUG)
    _Emit.__call__ = staticmethod(_report if is_heard else "".format)  # type: ignore[method-assign]


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
    follow_listeners()
    try:
        yield listener
    finally:
        # By identity: two recordings may hold equal lists.
        _listeners[:] = [other for other in _listeners if other is not listener]
        follow_listeners()


def profiler_range(name: str, fqn: str = "") -> AbstractContextManager[object]:
    """A profiler range around a block: ``name (fqn)``, or ``name fqn`` if the name ends in "for". Hot paths check
    `profiler_is_on` first, which runs no Python code."""
    if not profiler_is_on():
        return NOTHING
    if name.endswith(" for"):
        return record_function(f"{name} {fqn}")
    return record_function(f"{name} ({fqn})" if fqn else name)
