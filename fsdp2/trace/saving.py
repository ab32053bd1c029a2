"""`save`: timelines as a page, a picture, or a trace for Perfetto. Layer: trace.

The only file that uses matplotlib, which is an optional dependency (``pip install "fsdp2[plot]"``).
"""

import json
from importlib import import_module
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.trace.drawing import COLOURS, PALETTE, amount, duration, lanes_svg, legend, memory_svg, page
from fsdp2.trace.timeline import LANES, Timeline

__all__ = ["chrome_trace", "save"]


def save(path: str | PathLike[str], *timelines: Timeline) -> None:
    """Write timelines, one below the other on the same axis: what was measured and what was planned, say.

    Args:
        path: ends in .html (a page without script, which loads nothing), .png (needs matplotlib) or .json (the trace
            format of Chrome, which https://ui.perfetto.dev opens).

    Raises:
        ArgumentError: no timeline, or another ending.
        UnsupportedError: matplotlib is not installed.
    """
    path = Path(path)
    if not timelines:
        raise ArgumentError("trace.save: expected one timeline or more, got none")
    if path.suffix == ".html":
        path.write_text(_html(timelines), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")
    elif path.suffix == ".png":
        _figure(timelines).savefig(path, dpi=150)
    else:
        raise ArgumentError(f"trace.save: expected a path that ends in .html, .png or .json, got {path}")


def _html(timelines: tuple[Timeline, ...]) -> str:
    end = max(timeline.end_s for timeline in timelines) or 1.0
    found = {span.lane for timeline in timelines for span in timeline.spans}
    sections = [legend({lane: COLOURS[lane] for lane in COLOURS if lane in found})]
    for timeline in timelines:
        sections.append(f"<h2>{timeline.title}: {duration(timeline.end_s)}, {_exposed(timeline)}</h2>")
        sections.append(lanes_svg(timeline, end))
        if timeline.samples:
            peak = max(sample.total for sample in timeline.samples)
            sections.append(f"<p>Memory: {amount(peak)} at the peak</p>{memory_svg(timeline, end)}")
    return page("Timeline", sections)


def _exposed(timeline: Timeline) -> str:
    waited = sum(span.seconds for span in timeline.spans if span.lane == "waiting")
    return f"{duration(waited)} of it exposed communication"


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


def _figure(timelines: tuple[Timeline, ...]) -> Any:
    """A figure of matplotlib, of lanes and memory in turn."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError('trace.save: a .png needs matplotlib: pip install "fsdp2[plot]"') from error
    num_rows = sum(1 + bool(timeline.samples) for timeline in timelines)
    figure = figures.Figure(figsize=(11, 2.6 * num_rows), layout="constrained")
    axes = iter(figure.subplots(num_rows, 1, sharex=True, squeeze=False).flat)
    for timeline in timelines:
        found = {span.lane for span in timeline.spans}
        lanes = [lane for lane in LANES if lane in found]
        axis = next(axes)
        for span in timeline.spans:
            row = lanes.index(span.lane)
            axis.barh(row, span.seconds * 1e3, left=span.begin_s * 1e3, height=0.8, color=COLOURS[span.lane])
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        axis.set_title(f"{timeline.title}: {duration(timeline.end_s)}, {_exposed(timeline)}", loc="left", fontsize=10)
        if timeline.samples:
            axis = next(axes)
            kinds = list(timeline.samples[0].nbytes)
            times = [sample.at_s * 1e3 for sample in timeline.samples]
            layers = [[sample.nbytes[kind] / 2**20 for sample in timeline.samples] for kind in kinds]
            axis.stackplot(times, layers, labels=kinds, colors=PALETTE, step="post")
            axis.set_ylabel("MiB")
            axis.set_ylim(0, 1.4 * max(map(sum, zip(*layers, strict=True))) or 1)  # with room for the legend
            axis.legend(loc="upper left", fontsize=7, ncols=3)
        axis.set_xlabel("ms")
    return figure
