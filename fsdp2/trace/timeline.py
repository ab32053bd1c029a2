"""`Timeline`: what ran when, and what was in memory; and its file for Perfetto. Layer: trace.

A recorded timeline consists of the runtime's events, on the host's clock. On the CPU these are the times of the work
itself. With an accelerator they are the times at which the host issued work; `torch.profiler`, in which the same phases
are ranges, shows when it ran.

The time between two events counts as compute of their unit, except for waits. A collective lasts from its issue to the
end of the wait for it, so it may have finished earlier.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2 import events

__all__ = ["LANES", "Sample", "Span", "Timeline", "chrome_trace", "follow", "record", "save"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

# From top to bottom.
LANES = ("compute", "optimizer", "waiting", "all-gather", "reduce-scatter", "all-reduce", "tensor parallel", "copies")


@dataclass
class Span:
    """Something that took time.

    Attributes:
        lane: one of `LANES`.
        name: the unit, and what it did.
        begin_s, end_s: seconds since the timeline's start.
    """

    lane: str
    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Sample:
    """Memory from this moment on: bytes by kind."""

    at_s: float
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass
class Timeline:
    """Some steps of one rank.

    Attributes:
        title: what ran, and whether it was measured or predicted.
        spans: in any order.
        samples: in order of time.
    """

    title: str
    spans: Sequence[Span] = field(default_factory=list)
    samples: Sequence[Sample] = field(default_factory=list)


@contextmanager
def record(title: str = "measured") -> Iterator[Timeline]:
    """Record this rank's steps in the block. Each rank records for itself; nothing is communicated.

    Args:
        title: the title of the timeline.

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
            log.append(events.Event(f"{kind}_step", "optimizer", at=perf_counter()))

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
        lane = "waiting" if what == "done" else "optimizer" if name.startswith("step") else "compute"
        if event.at > last and (running or lane == "waiting"):
            spans.append(Span(lane, name, last - start, event.at - start))
        last = max(last, event.at)
        unit = event.unit or "(root)"
        if event.kind in _COLLECTIVES:
            in_flight[event.kind, unit].append(event.at)
        elif what == "done" and in_flight[kind, unit]:
            begin = in_flight[kind, unit].popleft()
            spans.append(Span(kind.replace("_", "-"), unit, begin - start, event.at - start))
        follow(running, event)
    return spans


def follow(running: list[str], event: events.Event) -> None:
    """Update the list of what is running: forwards and backwards of units, and optimizer steps."""
    kind, _, what = event.kind.partition("_")
    label = f"{what} {event.unit or '(root)'}"
    if kind == "pre" and what in ("forward", "backward", "step"):
        running.append(label)
    elif kind == "post" and label in running:
        running.remove(label)


def save(path: str | PathLike[str], *timelines: Timeline) -> None:
    """Write timelines on the same axis, for example a measured and a planned one.

    Args:
        path: the file, such as ``step.json``, in Chrome's trace format, which https://ui.perfetto.dev opens.
    """
    Path(path).write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """Chrome's trace format: a process for each timeline, a thread for each lane, a counter for memory. Events of a
    thread must not overlap partly, so a lane with such spans gets more threads.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    found: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        where = {"pid": process}
        found.append({"ph": "M", "name": "process_name", **where, "args": {"name": timeline.title}})
        ends: dict[tuple[str, int], float] = {}
        for span in sorted(timeline.spans, key=lambda span: (LANES.index(span.lane), span.begin_s)):
            row = next(row for row in count() if ends.get((span.lane, row), 0.0) <= span.begin_s)
            where_in = {**where, "tid": LANES.index(span.lane) + row * len(LANES)}
            if (span.lane, row) not in ends:
                name = f"{span.lane} {row + 1}" if row else span.lane
                order = {"sort_index": LANES.index(span.lane)}
                found.append({"ph": "M", "name": "thread_name", **where_in, "args": {"name": name}})
                found.append({"ph": "M", "name": "thread_sort_index", **where_in, "args": order})
            ends[span.lane, row] = span.end_s
            times = {"ts": span.begin_s * 1e6, "dur": span.seconds * 1e6}
            found.append({"ph": "X", "name": span.name or span.lane, "cat": span.lane, **where_in, **times})
        for sample in timeline.samples:
            at = {"ts": sample.at_s * 1e6}
            found.append({"ph": "C", "name": "bytes", **where, **at, "args": dict(sample.nbytes)})
    return {"traceEvents": found, "displayTimeUnit": "ms"}
