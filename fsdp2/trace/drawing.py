"""A timeline and memory as SVG, and pages that need nothing but themselves. Layer: trace.

Widths are in units of the view box; a page scales a drawing to its width, and lets a narrow screen scroll it.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from fsdp2.trace.timeline import LANES, Timeline

__all__ = ["COLOURS", "PALETTE", "amount", "duration", "lanes_svg", "legend", "memory_svg", "page", "table"]

WIDTH, LEFT, LANE = 960, 118, 22

# Okabe and Ito's colours, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999", "#D55E00", "#F0E442")
COLOURS = {
    "compute": "#0072B2",
    "optimizer": "#56B4E9",
    "waiting": "#D55E00",
    "all-gather": "#009E73",
    "reduce-scatter": "#E69F00",
    "all-reduce": "#CC79A7",
    "tensor parallel": "#F0E442",
    "copies": "#882255",
    "host": "#999999",
}

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ccc; --soft: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #161616; --line: #444; --soft: #222; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       padding: 1rem; max-width: 62rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } svg { display: block; width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); }
th { text-align: left; background: var(--soft); } td { white-space: nowrap; font-variant-numeric: tabular-nums; }
s { opacity: .6; } .bad { color: #D55E00; font-weight: 600; } .key { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px; }
"""


def amount(nbytes: float) -> str:
    """Bytes in the unit that suits them: ``11.2 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: ``12.3 ms``."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.2f} s" if seconds else "0"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def page(title: str, sections: Iterable[str]) -> str:
    """A whole HTML page: no script, no font, nothing that is loaded."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], struck: Sequence[bool] = ()) -> str:
    """An HTML table; rows that are `struck` are crossed out."""
    parts = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for index, row in enumerate(rows):
        mark = "s" if index < len(struck) and struck[index] else "span"
        parts.append("<tr>" + "".join(f"<td><{mark}>{escape(cell)}</{mark}></td>" for cell in row) + "</tr>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'


def legend(colours: Mapping[str, str]) -> str:
    """What the colours mean."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f"<p>{''.join(keys)}</p>"


def _axis(end_s: float, height: float) -> str:
    """Six times along the bottom, with lines."""
    parts = []
    for index in range(6):
        x = LEFT + (WIDTH - LEFT - 40) * index / 5
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" stroke="var(--line)" stroke-width=".5"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 15}" text-anchor="middle">{duration(end_s * index / 5)}</text>')
    return "".join(parts)


def _x(seconds: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - 40) * seconds / end_s


def lanes_svg(timeline: Timeline, end_s: float | None = None) -> str:
    """The spans of a timeline, a row for each lane; the mouse shows their names.

    Args:
        end_s: the time at the right edge, to draw two timelines on the same axis; None: its own end.
    """
    end = end_s or timeline.end_s or 1.0
    found = {span.lane for span in timeline.spans}
    lanes = [lane for lane in LANES if lane in found]
    height = LANE * len(lanes) + 4
    parts = [_axis(end, height)]
    for row, lane in enumerate(lanes):
        parts.append(f'<text x="{LEFT - 8}" y="{row * LANE + 16}" text-anchor="end">{lane}</text>')
    for span in timeline.spans:
        x, right = _x(span.begin_s, end), _x(span.end_s, end)
        parts.append(
            f'<rect x="{x:.2f}" y="{lanes.index(span.lane) * LANE + 3}" width="{max(right - x, 0.3):.2f}" '
            f'height="{LANE - 5}" fill="{COLOURS[span.lane]}" stroke="var(--paper)" stroke-width=".3">'
            f"<title>{escape(span.name or span.lane)}: {duration(span.seconds)}</title></rect>"
        )
    return f'<div class="wide"><svg viewBox="0 0 {WIDTH} {height + 22}" role="img">{"".join(parts)}</svg></div>'


def memory_svg(timeline: Timeline, end_s: float | None = None, limit: int | None = None, height: int = 220) -> str:
    """Bytes by kind over time, stacked, with a line at `limit`; and the legend. See `lanes_svg`."""
    samples, end = timeline.samples, end_s or timeline.end_s or 1.0
    kinds = [kind for kind in samples[0].nbytes if any(sample.nbytes[kind] for sample in samples)]
    top = max(sample.total for sample in samples) * 1.08 or 1
    if limit is not None and limit < 3 * top:
        top = max(top, limit * 1.12)
    colours = dict(zip(kinds, PALETTE, strict=False))

    def y(nbytes: float) -> float:
        return height * (1 - nbytes / top)

    parts = [_axis(end, height)]
    for step in range(5):
        at = top * step / 4
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(at) + (4 if step < 4 else 12):.1f}" text-anchor="end">{amount(at)}</text>'
        )
    below = [0.0] * len(samples)
    times = [sample.at_s for sample in samples]
    for kind in kinds:
        above = [low + sample.nbytes[kind] for low, sample in zip(below, samples, strict=True)]
        points = _outline(times, above, below, timeline.end_s, end)
        path = " ".join(f"{x:.1f},{y(nbytes):.1f}" for x, nbytes in points)
        parts.append(f'<polygon points="{path}" fill="{colours[kind]}"><title>{escape(kind)}</title></polygon>')
        below = above
    if limit is not None and limit <= top:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 40}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="#D55E00" '
            f'stroke-dasharray="6 4"/><text x="{LEFT + 6}" y="{y(limit) - 5:.1f}">{amount(limit)} there are</text>'
        )
    svg = f'<svg viewBox="0 0 {WIDTH} {height + 22}" role="img">{"".join(parts)}</svg>'
    return f'<div class="wide">{svg}</div>{legend(colours)}'


def _outline(
    times: Sequence[float], above: Sequence[float], below: Sequence[float], until: float, end_s: float
) -> list[tuple[float, float]]:
    """The corners of an area whose edges are steps, thinned to what a screen can show: of the samples within one unit
    of width, the highest. The last one holds until `until`."""
    chosen: list[int] = []
    for index, seconds in enumerate(times):
        x = int(_x(seconds, end_s))
        if chosen and int(_x(times[chosen[-1]], end_s)) == x:
            if above[index] > above[chosen[-1]]:
                chosen[-1] = index
        else:
            chosen.append(index)
    top, bottom = [], []
    for position, index in enumerate(chosen):
        right = _x(times[chosen[position + 1]] if position + 1 < len(chosen) else until, end_s)
        top += [(_x(times[index], end_s), above[index]), (right, above[index])]
        bottom += [(_x(times[index], end_s), below[index]), (right, below[index])]
    return top + bottom[::-1]
