"""Races, and how they are told: both operations, both stacks."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.instruments.races.memory import Operation, Stack

__all__ = ["Race", "Report", "is_of_library", "where"]

ROOT = Path(__file__).parents[3]
LIBRARY, CHECKPOINTS = str(ROOT / "fsdp2"), str(ROOT / "fsdp2" / "checkpoint")
MOST_FRAMES = 14
MOST_SHOWN = 8
_is_told: dict[CodeType, bool] = {}


def where() -> Stack:
    """The frames of the library and of the program, innermost first."""
    stack: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(stack) < MOST_FRAMES:
        code = frame.f_code
        if code not in _is_told:
            name = code.co_filename
            _is_told[code] = (
                name.startswith(str(ROOT)) and "site-packages" not in name and "/tests/instruments/races/" not in name
            )
        if _is_told[code] or "/tests/instruments/races/test_" in code.co_filename:
            stack.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack)


def is_of_library(stack: Stack) -> bool:
    """Whether the innermost frame is one of fsdp2; but not within its checkpoints, which fill memory from files,
    unseen."""
    paths = [path for path, _, _ in stack]
    return bool(paths) and paths[0].startswith(LIBRARY) and not any(path.startswith(CHECKPOINTS) for path in paths)


@dataclass(frozen=True)
class Race:
    """Two operations that nothing orders.

    Attributes:
        kind: ``read``, ``write`` (what `operation` does), or ``reuse`` (it may get the memory that `other` uses).
        other: None: nobody has filled what is read.
        nbytes: in common.
    """

    kind: str
    operation: Operation
    other: Operation | None
    nbytes: int

    @property
    def key(self) -> object:
        """Equal for races of the same two places."""
        other = self.other
        places = other and (other.name, other.stream, other.stack)
        return self.kind, self.operation.name, self.operation.stream, self.operation.stack, places

    def told(self) -> str:
        """Some lines of text."""
        if self.other is None:
            head = f"{self.nbytes} bytes are read that nobody has filled"
        elif self.kind == "reuse":
            head = "a block that was freed may be allocated again while another stream still uses it, last"
        else:
            head = f"{self.nbytes} bytes, and nothing orders"
        others = [] if self.other is None else ["", f"  and {told(self.other)}"]
        return "\n".join([head, f"  {self.kind} by {told(self.operation)}", *others])


def told(operation: Operation) -> str:
    lines = [f"{operation.name} on stream '{operation.stream}'"]
    for path, line, function in operation.stack:
        lines.append(f"    {path.removeprefix(str(ROOT) + '/')}:{line} in {function}")
    return "\n".join(lines)


class Report:
    """The races of a program, each once."""

    def __init__(self) -> None:
        self.races: dict[object, Race] = {}

    def add(self, race: Race) -> None:
        self.races.setdefault(race.key, race)

    def check(self) -> None:
        """Raise if there are races."""
        if self.races:
            told = [race.told() for race in self.races.values()]
            more = [f"and {len(told) - MOST_SHOWN} more"] if len(told) > MOST_SHOWN else []
            raise AssertionError("\n\n".join([f"{len(told)} races", *told[:MOST_SHOWN], *more]))
