"""`Tape`: what was done to the memory that a model was built in, and what of it one tensor needs. Layer: init.

The unit of memory is the *cell*: one storage. Views need no entry of their own: a tensor is a window on its cell, and
the window says where. An entry is an operation that wrote to a cell, or made one. The state of a cell at a time is what
the entries before that time wrote; replaying all that wrote to it, and what those read, in their order, restores it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["Cell", "Constant", "Draw", "Entry", "Tape", "Window", "map_args"]


@dataclass(eq=False)
class Cell:
    """One storage.

    Attributes:
        storage: of the stand-ins on the meta device: no memory, but a size, and an identity while the tape lives.
        device: where the storage of the eager model would be.
        writes: times of the entries that wrote to it.
    """

    storage: torch.UntypedStorage
    device: torch.device
    writes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """A tensor as it was at some time: where in a cell, and how its elements are read."""

    cell: Cell
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def covers_cell(self) -> bool:
        """Whether no byte of the cell lies outside of it. (As many elements as there is room for, each once.)"""
        numel, order = 1, sorted(zip(self.stride, self.shape, strict=True))
        for stride, size in order:
            if size != 1 and stride != numel:
                return False
            numel *= size
        return self.offset == 0 and numel * self.dtype.itemsize >= self.cell.storage.nbytes()


@dataclass(frozen=True)
class Constant:
    """A real tensor that an entry reads, and its version then: it belongs to others, who must not have changed it."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class Draw:
    """Where an entry's random numbers come from.

    Attributes:
        device: of the generator.
        state: of the generator before; None where the numbers have a stream of their own.
        seed: of that stream.
    """

    device: torch.device
    state: torch.Tensor | None = None
    seed: int = 0


@dataclass(frozen=True)
class Entry:
    """One operation.

    Attributes:
        op: an `OpOverload`.
        args, kwargs: with a `Window` or a `Constant` in place of each tensor.
        results: of each tensor that it returns, the window; None for one that it was given.
        reads: cells whose content before it matters to what it does.
        replaces: cells of which it leaves nothing as it was.
        default_dtype: of torch, then.
        draw: of a random operation.
    """

    time: int
    op: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: tuple[Window | None, ...]
    reads: frozenset[Cell]
    replaces: frozenset[Cell]
    default_dtype: torch.dtype
    draw: Draw | None

    @cached_property
    def cells(self) -> frozenset[Cell]:
        """All that it touches."""
        found = {result.cell for result in self.results if result is not None}
        map_args(Window, lambda window: found.add(window.cell), (self.args, self.kwargs))
        return frozenset(found)


class Tape:
    """All entries in their order, and all cells.

    Attributes:
        entries: an entry's time is its index.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._cells: dict[int, Cell] = {}  # by the id of the storage, which the cell keeps alive

    @property
    def now(self) -> int:
        """The time of the next entry."""
        return len(self.entries)

    def add_cell(self, tensor: torch.Tensor, device: torch.device) -> Cell:
        """The cell of a stand-in (a meta tensor) that is new, for memory on `device`."""
        storage = tensor.untyped_storage()
        return self._cells.setdefault(id(storage), Cell(storage, device))

    def cell_of(self, tensor: torch.Tensor) -> Cell | None:
        """The cell of a stand-in; None for any other tensor."""
        if is_lazy(tensor) or not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._cells.get(id(tensor.untyped_storage()))

    def window_of(self, tensor: torch.Tensor) -> Window | None:
        """The window of a stand-in as it is now; None for any other tensor."""
        cell = self.cell_of(tensor)
        if cell is None:
            return None
        return Window(
            cell,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def append(self, entry: Entry, written: Iterable[Cell]) -> None:
        """Add an entry that wrote to, or made, these cells."""
        assert entry.time == self.now
        self.entries.append(entry)
        for cell in set(written):
            cell.writes.append(entry.time)

    def needed(self, cells: Iterable[Cell], time: int) -> list[Entry]:
        """The entries that together restore what `cells` held at `time`, in their order. What was overwritten since is
        not among them."""
        times: set[int] = set()
        wanted = [(cell, time) for cell in cells]
        known = set(wanted)
        while wanted:
            cell, before = wanted.pop()
            for index in reversed(cell.writes[: bisect_left(cell.writes, before)]):
                entry = self.entries[index]
                if index not in times:
                    times.add(index)
                    more = {(each, index) for each in entry.reads} - known
                    known |= more
                    wanted += more
                if cell in entry.replaces:
                    break
        return [self.entries[index] for index in sorted(times)]


def map_args(kind: type | tuple[type, ...], fn: Callable[[Any], Any], value: Any) -> Any:
    """`value`, the arguments or results of an operator, with everything of `kind` replaced by ``fn(it)``."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_args(kind, fn, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_args(kind, fn, item) for key, item in value.items()}
    return value
