"""`record`: the timeline of real steps, from the runtime's events, on the host's clock. Layer: trace.

On the CPU that is what happened. An accelerator's host only issues work: its lanes say when, and `torch.profiler`, in
which the same phases are ranges, says when the work ran.

Compute is whatever runs between two events, for the unit that they are about; waits are not compute. A collective lasts
from its issue to the end of the wait for it, so it may have been over before.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2 import events
from fsdp2._torch import MemoryMode
from fsdp2.adjacent import wholes
from fsdp2.trace.memory import Kind, Memory, tensors_in
from fsdp2.trace.timeline import Sample, Span, Timeline

__all__ = ["Recording", "record"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


class Recording:
    """What `record` records.

    Attributes:
        timeline: complete after the block.
    """

    def __init__(self, title: str) -> None:
        self.timeline = Timeline(title)


@contextmanager
def record(
    model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, *, title: str = "measured"
) -> Iterator[Recording]:
    """Record this rank's steps in the block. Each rank records for itself; nothing is communicated.

    Args:
        model: count the memory of this sharded model too, of which a step must have run before. Every operator is
            looked at, so steps take longer, mostly those of small models.
        optimizer: whose states to tell from other memory.
        title: what the timeline is called.

    Example::

        with trace.record(model, optimizer) as recording:
            train_step()
        trace.save("step.json", recording.timeline)
    """
    recording = Recording(title)
    steps: list[float] = []
    meter = None if model is None else Meter(model, optimizer)

    def begins(*_: object) -> None:
        steps.append(perf_counter())
        if meter is not None:
            meter.mark_gradients()

    hooks = [
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(lambda *_: steps.append(perf_counter())),
    ]
    start = perf_counter()
    try:
        with events.record() as log:
            if meter is None:
                yield recording
            else:
                with meter:
                    yield recording
    finally:
        end = perf_counter()
        for hook in hooks:
            hook.remove()
        if meter is not None:
            meter.memory.close()
    recording.timeline.spans = spans_of(log, steps, start, end)
    if meter is not None:
        recording.timeline.samples = [Sample(max(each.at_s - start, 0.0), each.nbytes) for each in meter.samples()]


def spans_of(log: Sequence[events.Event], steps: Sequence[float], start: float, end: float) -> list[Span]:
    """The spans of events between two times.

    Args:
        steps: when each optimizer step began and ended, in turn.
    """
    spans: list[Span] = []
    running: list[str] = []
    in_flight: dict[tuple[str, str], deque[float]] = defaultdict(deque)
    pauses = deque(zip(steps[::2], steps[1::2], strict=False))
    last = start

    def passed(until: float, lane: str) -> None:
        """Up to `until`, what is running ran; without what the optimizer did in between."""
        nonlocal last
        while pauses and pauses[0][0] < until:
            begin, finish = pauses.popleft()
            add(lane, last, begin)
            spans.append(Span("optimizer", "step", begin - start, finish - start))
            last = finish
        add(lane, last, until)
        last = max(last, until)

    def add(lane: str, begin: float, until: float) -> None:
        name = running[-1] if running else ""
        if until > begin and (running or lane == "waiting"):
            spans.append(Span(lane, name, begin - start, until - start))

    for event in log:
        kind, _, what = event.kind.rpartition("_")
        passed(event.at, "waiting" if what == "done" else "compute")
        label = f"{what} {event.unit or '(root)'}"
        if event.kind in _COLLECTIVES:
            in_flight[event.kind, event.unit].append(event.at)
        elif what == "done" and in_flight[kind, event.unit]:
            begin = in_flight[kind, event.unit].popleft()
            spans.append(Span(kind.replace("_", "-"), event.unit or "(root)", begin - start, event.at - start))
        elif kind == "pre" and what in ("forward", "backward"):
            running.append(label)
        elif kind == "post" and label in running:
            running.remove(label)
    passed(end, "compute")
    return spans


class Meter(MemoryMode):
    """Counts the memory that operators meet, at the time of each."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.memory = Memory(None)
        self.memory.seconds = perf_counter()
        self._model = model
        self._twice = wholes()
        self.memory.mark_what_stays(model, optimizer)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # it becomes operators of local tensors, which come here too
        if getattr(function, "is_view", False):
            return function(*args, **kwargs)
        function = self.as_without(function, args)
        self.memory.tick += 1
        self.memory.seconds = perf_counter()
        self.memory.look()
        result = function(*args, **kwargs)
        is_sent = function.namespace == "c10d"
        for tensor in tensors_in((args, kwargs, result)):
            if id(tensor.untyped_storage()) not in self._twice:
                self.memory.mark(tensor, Kind.COMMUNICATION if is_sent else Kind.ACTIVATIONS)
                if is_sent:  # a buffer that the first step made, which is freed and allocated again
                    self.memory.mark_elastic(tensor)
        if function.__name__.startswith("set_"):
            self.memory.mark_elastic(result)
        self.memory.tick += 1  # what dies now was alive together with the result
        return result

    def mark_gradients(self) -> None:
        """The sharded gradients are there: say what their memory holds."""
        for param in self._model.parameters():
            self.memory.mark(param.grad, Kind.GRADIENTS)

    def samples(self) -> list[Sample]:
        """Bytes by kind at each change."""
        self.mark_gradients()
        return self.memory.samples(0)
