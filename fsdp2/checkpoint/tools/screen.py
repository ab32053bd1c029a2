"""The lines that the command line prints, and its progress. Layer: checkpoint."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod

from fsdp2.checkpoint.formats.native import NATIVE
from fsdp2.checkpoint.io.workers import Progress
from fsdp2.checkpoint.tools.describing import Description
from fsdp2.checkpoint.tools.inspection import Report

__all__ = ["clean", "described", "listed", "progress", "reported"]

EVERY_S = 5.0  # between two lines of progress


def clean(line: str) -> str:
    """The line without control characters: a name in a file may have those of a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def progress(title: str) -> Progress:
    """Writes a line to standard error every few seconds."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= EVERY_S:
            last, rate = now, done / (now - start + 1e-9)
            sys.stderr.write(f"{clean(title)}: {_size(done)} of {_size(total)}, {_size(rate)}/s\n")

    return report


def described(one: Description, pattern: str | None) -> Iterator[str]:
    """The content of a checkpoint, with the tensors whose names match the pattern."""
    about = ", ".join(f"{name}={value}" for name, value in one.about.items())
    facts = {"checkpoint": one.folder, "format": f"{one.kind} {one.layout}", "step": one.step, "ranks": one.world or ""}
    facts |= {"id": one.id, "checksums": one.checksum, "optimizer": one.optimizer, "extra": ", ".join(one.extra)}
    facts |= {"about": about, "also there": ", ".join(one.strays)}
    yield from (f"{name:<11}{value}".rstrip() for name, value in facts.items() if value not in (None, ""))
    rows: list[Sequence[object]] = []
    for section in dict.fromkeys(tensor.section for tensor in one.tensors):
        own = [tensor for tensor in one.tensors if tensor.section == section]
        numel, nbytes = sum(prod(tensor.shape) for tensor in own), sum(tensor.nbytes for tensor in own)
        dtypes = ", ".join(sorted({tensor.dtype for tensor in own}))
        rows.append((section, f"{len(own):,}", f"{numel:,}", _size(nbytes), dtypes))
    yield from _table("section, >tensors, >elements, >size, dtypes", rows)
    files = [(name, _size(size)) for name, size in one.files.items()]
    yield from _table("file, >size", [*files[:20], (f"... ({len(files)} files)", "")][: len(files)])
    chosen = [tensor for tensor in one.tensors if pattern is not None and fnmatchcase(tensor.name, pattern)]
    chosen.sort(key=lambda each: (each.section, re.sub(r"\d+", lambda digits: digits[0].zfill(9), each.name)))
    cells = [(t.section, t.name, t.dtype, [*t.shape], _size(t.nbytes), t.parts, ", ".join(t.aliases)) for t in chosen]
    yield from _table("section, name, dtype, shape, >size, >parts, also called", cells)
    yield from (f"not read: {name}: {why}" for name, why in one.left_out.items())


def listed(found: Iterable[Description], damaged: Iterable[str]) -> Iterator[str]:
    """The checkpoints of a run, and what is wrong with those that cannot be read."""
    rows = [
        (os.path.basename(d.folder), d.step, d.world or "", d.layout or d.kind, len(d.tensors), _size(d.nbytes))
        for d in found
    ]
    yield from _table("checkpoint, >step, >ranks, layout, >tensors, >size", rows)
    yield from (f"damaged: {problem}" for problem in damaged)


def reported(report: Report) -> Iterator[str]:
    """Whether a checkpoint is intact."""
    unchecked, about = _size(report.unchecked_bytes), f"{report.folder}: {report.num_tensors} tensors"
    if report.damage:
        yield f"{report.folder} is damaged"
        yield from (f"  {damage}" for damage in report.damage)
    elif report.kind != NATIVE and not report.checked_bytes:
        yield f"readable {about}, {unchecked} read; their values cannot be checked: {report.kind} has no checksums"
    else:
        more = f", {unchecked} that have no checksums" if report.unchecked_bytes else ""
        yield f"whole {about}, {_size(report.checked_bytes)} checked{more}"
    if report.strays:
        yield f"not of the checkpoint: {', '.join(report.strays)}"
    yield from (f"not read: {name}: {why}" for name, why in report.left_out.items())


def _table(columns: str, rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Rows below the columns' names, if there are any; to the right where a name begins with ">"."""
    sides, names = columns.split(", "), columns.replace(">", "").split(", ")
    cells = [["" if cell is None else str(cell) for cell in row] for row in (names, *rows)]
    widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    form = "   ".join(f"{{:{'<>'['>' in side]}{width}}}" for side, width in zip(sides, widths, strict=True))
    yield from ["", *(f"  {form.format(*row)}".rstrip() for row in cells)] if rows else []


def _size(nbytes: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, _ = nbytes / 1000, units.pop()
    return f"{nbytes:.3g} {units[-1]}"
