"""`save`: timelines as a trace that Perfetto opens. Layer: trace."""

import json
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError
from fsdp2.trace.timeline import LANES, Timeline

__all__ = ["chrome_trace", "save"]


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
