"""Draw docs/figures/trace.svg, the ranges of a step in a trace: ``python docs/make_trace.py``."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp2
from tests.helpers.ranks import close_pools, run_on_ranks

FILE = Path(__file__).parent / "figures" / "trace.svg"
WIDTH, ROW, MARGIN, LETTER = 1600, 22, 12, 6.2
COLORS = {"all_gather": "#4c78a8", "reduce": "#e45756", "hand_over": "#72b7b2", "Optimizer": "#b279a2", "": "#bab0ac"}

Range = tuple[str, float, float, int]  # name, start and end in microseconds, how many ranges it is within


def traced(rank: int, world_size: int) -> list[Range]:
    """The ranges of the fifth step of a model of three units."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)) for _ in range(3)])
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(48, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    events = [each for each in trace.events() if each.name.startswith(("FSDP::", "Optimizer.step"))]
    return nested((each.name, each.time_range.start, each.time_range.end) for each in events)


def nested(events: Iterable[tuple[str, float, float]]) -> list[Range]:
    """Each range below those that it is within."""
    found: list[Range] = []
    open_until: list[float] = []
    for name, start, end in sorted(events, key=lambda each: (each[1], -each[2])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        found.append((name, start, end, len(open_until)))
        open_until.append(end)
    return found


def svg(ranges: list[Range]) -> str:
    """A picture of the ranges, from left to right in time."""
    first, last = min(start for _, start, _, _ in ranges), max(end for _, _, end, _ in ranges)
    scale = (WIDTH - 2 * MARGIN) / (last - first)
    height = ROW * (max(depth for *_, depth in ranges) + 1) + 2 * MARGIN + ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for name, start, end, depth in ranges:
        x, y, width = MARGIN + (start - first) * scale, MARGIN + ROW * depth, max((end - start) * scale, 0.5)
        shown = name.removeprefix("FSDP::")
        color = next(color for part, color in COLORS.items() if part in name)
        title = f"<title>{name}: {(end - start) / 1e3:.2f} ms</title>"
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{color}">{title}</rect>')
        letters = int((width - 6) / LETTER)
        if letters > 6:
            text = shown if len(shown) <= letters else shown[: letters - 1] + "…"
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 13}">{text}</text>')
    parts.append(
        f'<text x="{MARGIN}" y="{height - 8}">{(last - first) / 1e3:.0f} ms, two gloo ranks: forward, backward, '
        "optimizer</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    ranges: Any = run_on_ranks(traced, 2)[0]
    close_pools()
    FILE.write_text(svg(ranges))


if __name__ == "__main__":
    main()
