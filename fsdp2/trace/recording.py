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
    steps: list[float] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: steps.append(perf_counter())),
        register_optimizer_step_post_hook(lambda *_: steps.append(perf_counter())),
    ]
    start = perf_counter()
    try:
        with events.record() as log:
            yield timeline
    finally:
        end = perf_counter()
        for hook in hooks:
            hook.remove()
    timeline.spans = spans_of(log, steps, start, end)


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
