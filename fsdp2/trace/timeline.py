"""`Timeline`: what ran when, and what was in memory; and the file of it that Perfetto opens. Layer: trace, bottom."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError

__all__ = ["LANES", "Sample", "Span", "Timeline", "chrome_trace", "save"]

# From top to bottom.
LANES = ("compute", "optimizer", "waiting", "all-gather", "reduce-scatter", "all-reduce", "tensor parallel", "copies")


@dataclass
class Span:
    """Something that went on for a while.

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
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Sample:
    """What was in memory from this moment on: bytes by kind."""

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


def save(path: str | PathLike[str], *timelines: Timeline) -> None:
    """Write timelines on the same axis: what was measured and what was planned, say.

    Args:
        path: ends in .json (the trace format of Chrome, which https://ui.perfetto.dev opens).

    Raises:
        ArgumentError: no timeline, or another ending.
    """
    path = Path(path)
    if not timelines:
        raise ArgumentError("trace.save: expected one timeline or more, got none")
    if path.suffix != ".json":
        raise ArgumentError(f"trace.save: expected a path that ends in .json, for https://ui.perfetto.dev; got {path}")
    path.write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """Chrome's trace format: a process for each timeline, a thread for each lane, a counter for memory. Events of a
    thread may not overlap in part, so a lane whose spans do has further threads.

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
