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

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2 import events
from fsdp2.trace.timeline import Span, Timeline

__all__ = ["record"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_STEP = "step"


@contextmanager
def record(title: str = "measured") -> Iterator[Timeline]:
    """Record this rank's steps in the block. Each rank records for itself; nothing is communicated.

    Args:
        title: what the timeline is called.

    Returns:
        The timeline, which is complete after the block.

    Example::

        with trace.record() as timeline:
            train_step()
        trace.save("step.json", timeline)
    """
    timeline = Timeline(title)
    with events.record() as log:

        def note(kind: str) -> None:
            log.append(events.Event(f"{kind}_{_STEP}", "", at=perf_counter()))

        begins = register_optimizer_step_pre_hook(lambda *_: note("pre"))
        ends = register_optimizer_step_post_hook(lambda *_: note("post"))
        start = perf_counter()
        try:
            yield timeline
        finally:
            begins.remove()
            ends.remove()
            timeline.spans = spans_of(log, start, perf_counter())


def spans_of(log: Sequence[events.Event], start: float, end: float) -> list[Span]:
    """The spans of events between two times."""
    spans: list[Span] = []
    running: list[str] = []
    in_flight: dict[tuple[str, str], deque[float]] = defaultdict(deque)
    last = start
    for event in (*log, events.Event("end", "", at=end)):
        kind, _, what = event.kind.rpartition("_")
        name = running[-1] if running else ""
        lane = "waiting" if what == "done" else "optimizer" if name == _STEP else "compute"
        if event.at > last and (running or lane == "waiting"):
            spans.append(Span(lane, name, last - start, event.at - start))
        last = max(last, event.at)
        unit = event.unit or "(root)"
        label = _STEP if what == _STEP else f"{what} {unit}"
        if event.kind in _COLLECTIVES:
            in_flight[event.kind, unit].append(event.at)
        elif what == "done" and in_flight[kind, unit]:
            begin = in_flight[kind, unit].popleft()
            spans.append(Span(kind.replace("_", "-"), unit, begin - start, event.at - start))
        elif kind == "pre" and what in ("forward", "backward", _STEP):
            running.append(label)
        elif kind == "post" and label in running:
            running.remove(label)
    return spans
