"""Races, and how they are told: the parameter, both operations, both stacks."""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch

from fsdp2._torch import local_tensor
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.reduction import Reduction
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

    def told(self, whose: str) -> str:
        """Some lines of text."""
        operation = self.operation
        if self.other is None:
            head, others = f"{whose}: {self.nbytes} bytes are read that nobody has filled", []
        elif self.kind == "reuse":
            head = "a block that was freed may be allocated again while another stream still uses it"
            others = ["", f"  last used by {told(self.other)}"]
        else:
            head = f"{whose}: {self.nbytes} bytes, and nothing orders"
            others = ["", f"  and {told(self.other)}"]
        return "\n".join([head, f"  {self.kind} by {told(operation)}", *others])


def told(operation: Operation) -> str:
    lines = [f"{operation.name} on stream '{operation.stream}'"]
    for path, line, function in operation.stack:
        lines.append(f"    {path.removeprefix(str(ROOT) + '/')}:{line} in {function}")
    return "\n".join(lines)


class Report:
    """The races of a program, each once.

    Attributes:
        races: what each is about, and how it is told.
    """

    def __init__(self) -> None:
        self.races: dict[object, tuple[Race, str]] = {}

    def add(self, race: Race, addresses: tuple[int, int]) -> None:
        """Note a race about these addresses."""
        if race.key not in self.races:
            self.races[race.key] = race, owner_of(*addresses)

    def check(self) -> None:
        """Raise if there are races."""
        if self.races:
            told = [race.told(whose) for race, whose in self.races.values()]
            more = [f"and {len(told) - MOST_SHOWN} more"] if len(told) > MOST_SHOWN else []
            raise AssertionError("\n\n".join([f"{len(told)} races", *told[:MOST_SHOWN], *more]))


def owner_of(start: int, end: int) -> str:
    """Whose memory this is: a parameter of a unit, a unit's reduction, or nobody's that is known."""
    reductions = []
    for each in gc.get_objects():
        if type(each) is ManagedParameter:  # not isinstance, which some of torch's objects warn of
            for what, tensor in tensors_of(each):
                if overlaps(tensor, start, end):
                    return f"{what} of '{each.fqn}'"
        elif type(each) is Reduction:
            reductions.append(each)
    for each in reductions:
        held = {} if each._run.gi_frame is None else each._run.gi_frame.f_locals
        tensors = [held.get("flat"), *held.get("kept", ()), *held.get("grads", ())]
        if any(overlaps(tensor, start, end) for tensor in tensors):
            return f"the reduction of unit '{each.fqn}'"
    return "other memory"


def tensors_of(param: ManagedParameter) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield "the unsharded parameter", param.whole
    yield "the unsharded parameter", param.unsharded
    yield "the shard", param.flat
    yield "the sharded gradient", param.sharded.grad
    yield "the unsharded gradient", None if param.unsharded is None else param.unsharded.grad


def overlaps(tensor: torch.Tensor | None, start: int, end: int) -> bool:
    if tensor is None:
        return False
    local = local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or not local.numel():
        return False
    first = local.data_ptr()
    return first < end and start < first + local.nbytes
