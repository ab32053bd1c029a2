"""Tables and progress bars of the command line; the only file that needs `rich`. Layer: checkpoint.

Results go to standard output, progress bars to standard error, and only to a terminal.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from math import prod
from typing import Any

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.tools.describing import Description, TensorEntry
from fsdp2.checkpoint.tools.inspection import Report
from fsdp2.checkpoint.tools.streaming import Progress
from fsdp2.errors import UnsupportedError

__all__ = [
    "check_installed",
    "progress",
    "show_description",
    "show_line",
    "show_pruned",
    "show_report",
    "show_run",
]

FILE_WIDTH = 160  # of lines written to a file or a pipe
MAX_FILES = 20


def check_installed() -> None:
    """Check that `rich` is installed.

    Raises:
        UnsupportedError: it is not.
    """
    _rich("console")


def _rich(name: str) -> Any:
    try:
        return import_module(f"rich.{name}")
    except ImportError as error:
        raise UnsupportedError(
            "tables and progress bars need the package rich: pip install 'fsdp2[cli]'. Or ask for --json."
        ) from error


def _console(stderr: bool = False) -> Any:
    console = _rich("console").Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = _rich("console").Console(stderr=stderr, highlight=False, width=FILE_WIDTH)
    return console


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Progress | None]:
    """A progress bar for the duration of the block on a terminal; otherwise None."""
    console = None if quiet else _console(stderr=True)
    if console is None or not console.is_terminal:
        yield None
        return
    kinds = _rich("progress")
    columns = (
        kinds.TextColumn("{task.description}"),
        kinds.BarColumn(),
        kinds.DownloadColumn(),
        kinds.TransferSpeedColumn(),
        kinds.TimeRemainingColumn(),
    )
    with kinds.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(_escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_description(description: Description, pattern: str | None) -> None:
    """Print the content of a checkpoint.

    Args:
        pattern: list the tensors whose names match it; None for none.
    """
    console = _console()
    facts = {
        "checkpoint": description.folder,
        "format": " ".join(filter(None, (description.kind, description.layout))),
        "step": "" if description.step is None else str(description.step),
        "ranks": str(description.world or ""),
        "id": description.id,
        "checksums": description.checksum,
        "optimizer": description.optimizer,
        "extra": ", ".join(_extra(key, *counts) for key, counts in description.extra.items()),
        "about": ", ".join(f"{name}={value}" for name, value in description.about.items()),
        "also there": ", ".join(description.strays),
    }
    for name, value in facts.items():
        if value:
            console.print(f"[bold]{name:<11}[/bold]{_escape(value)}", soft_wrap=True)
    console.print(_sections(description))
    if description.files:
        console.print(_files(description))
    if pattern is not None:
        chosen = [tensor for tensor in description.tensors if fnmatchcase(tensor.name, pattern)]
        console.print(_tensors(sorted(chosen, key=lambda tensor: (tensor.section, _natural(tensor.name)))))
    _show_left_out(description.left_out)


def show_run(path: str, found: Sequence[Description], damaged: Mapping[str, str], dead: Sequence[str]) -> None:
    """Print the checkpoints of a run.

    Args:
        damaged: what is wrong with those whose manifest cannot be read, by folder.
        dead: what dead saves left behind.
    """
    table = _table(path, "checkpoint", "step", "ranks", "layout", "tensors", "size", right=("step", "ranks", "tensors"))
    for one in found:
        name = one.folder.replace("\\", "/").rsplit("/", 1)[-1]
        size = _bytes(one.nbytes)
        step, ranks = "" if one.step is None else str(one.step), str(one.world or "")
        layout = one.layout or one.kind
        table.add_row(_escape(name), step, ranks, _escape(layout), str(len(one.tensors)), size)
    console = _console()
    console.print(table)
    for problem in damaged.values():
        console.print(f"[red]damaged[/red]: {_escape(problem)}", soft_wrap=True)
    for folder in dead:
        console.print(f"left over: {_escape(folder)}", soft_wrap=True)


def show_report(report: Report) -> None:
    """Print whether a checkpoint is intact."""
    console = _console()
    if report.damage:
        table = _table(f"{report.folder} is damaged", "file", "tensors", "bytes", "problem")
        for one in report.damage:
            names = ", ".join(one.tensors[:3]) + (f", ... ({len(one.tensors)})" if len(one.tensors) > 3 else "")
            span = f"{one.span[0]}..{one.span[1]}" if one.span else "all"
            table.add_row(_escape(one.file), _escape(names), span, _escape(one.problem))
        console.print(table)
    elif report.kind != NativeCatalog.kind and not report.checked_bytes:
        console.print(
            f"[green]readable[/green] {_escape(report.folder)}: {report.num_tensors} tensors, "
            f"{_bytes(report.unchecked_bytes)} read; their values cannot be checked: {_escape(report.kind)} has no "
            "checksums",
            soft_wrap=True,
        )
    else:
        unchecked = f", {_bytes(report.unchecked_bytes)} that have no checksums" if report.unchecked_bytes else ""
        console.print(
            f"[green]whole[/green] {_escape(report.folder)}: {report.num_tensors} tensors, "
            f"{_bytes(report.checked_bytes)} checked{unchecked}",
            soft_wrap=True,
        )
    if report.strays:
        console.print(f"not of the checkpoint: {_escape(', '.join(report.strays))}", soft_wrap=True)
    _show_left_out(report.left_out)


def _show_left_out(left_out: Mapping[str, str]) -> None:
    for name, why in left_out.items():
        _console().print(f"[yellow]not read[/yellow]: {_escape(name)}: {_escape(why)}", soft_wrap=True)


def show_pruned(old: Sequence[str], dead: Sequence[str], dry_run: bool) -> None:
    """Print what was deleted."""
    console = _console()
    verb = "would delete" if dry_run else "deleted"
    for folder in (*old, *dead):
        console.print(f"{verb} {_escape(folder)}", soft_wrap=True)
    if not old and not dead:
        console.print("nothing to delete")


def show_line(text: str) -> None:
    """Print one line."""
    _console().print(_escape(text), soft_wrap=True)


def _sections(description: Description) -> Any:
    table = _table("", "section", "tensors", "elements", "size", "dtypes", right=("tensors", "elements", "size"))
    sections: defaultdict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in description.tensors:
        sections[tensor.section].append(tensor)
    for section, tensors in sections.items():
        numel = sum(prod(tensor.shape) for tensor in tensors)
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        size = _bytes(sum(tensor.nbytes for tensor in tensors))
        table.add_row(_escape(section), f"{len(tensors):,}", f"{numel:,}", size, dtypes)
    return table


def _files(description: Description) -> Any:
    table = _table("", "file", "size", right=("size",))
    for name, size in list(description.files.items())[:MAX_FILES]:
        table.add_row(_escape(name), _bytes(size))
    if len(description.files) > MAX_FILES:
        rest = list(description.files.values())[MAX_FILES:]
        table.add_row(f"... and {len(rest)} more", _bytes(sum(rest)))
    return table


def _tensors(tensors: Sequence[TensorEntry]) -> Any:
    columns = ("section", "name", "dtype", "shape", "size", "parts", "also called")
    table = _table("", *columns, right=("size", "parts"))
    for one in tensors:
        shape, aliases = str(list(one.shape)), ", ".join(one.aliases)
        cells = (one.section, one.name, one.dtype, shape, _bytes(one.nbytes), str(one.parts), aliases)
        table.add_row(*map(_escape, cells))
    return table


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Any:
    box = _rich("box").SIMPLE_HEAD
    table = _rich("table").Table(title=_escape(title) or None, box=box, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _extra(key: str, ranks: int, contents: int) -> str:
    if ranks == 1:
        return key
    return f"{key} (the same on {ranks} ranks)" if contents == 1 else f"{key} (of {ranks} ranks, {contents} different)"


def _bytes(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _escape(text: str) -> str:
    """Escape markup and control characters in names."""
    printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return str(_rich("markup").escape(printable))
