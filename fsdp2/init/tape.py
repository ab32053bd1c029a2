"""`Tape`: the operations on the memory in which a model was built, and which of them a tensor needs. Layer: init.

The unit of memory is the *cell*: one storage. Views need no entry: a tensor is a window on its cell, which says where
it is. An entry is an operation that wrote to a cell, or created one. The state of a cell at a time is what the entries
before that time wrote. Replaying, in order, all entries that wrote to it, and to what those read, restores it.
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
        storage: the stand-ins' storage on the meta device: no memory, but a size, and an identity while the tape lives.
        device: the device of the storage in the eager model.
        writes: times of the entries that wrote to it.
    """

    storage: torch.UntypedStorage
    device: torch.device
    writes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """A tensor at some time: its place in a cell, and how its elements are read."""

    cell: Cell
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def covers_cell(self) -> bool:
        """Whether it contains every byte of the cell: as many elements as there is room for, each once."""
        numel, order = 1, sorted(zip(self.stride, self.shape, strict=True))
        for stride, size in order:
            if size != 1 and stride != numel:
                return False
            numel *= size
        return self.offset == 0 and numel * self.dtype.itemsize >= self.cell.storage.nbytes()


@dataclass(frozen=True)
class Constant:
    """A real tensor that an entry reads, and its version at that time. It belongs to others, who must not change it."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class Draw:
    """The source of an entry's random numbers.

    Attributes:
        device: of the generator.
        state: of the generator before the operation; None if the operation has its own stream.
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
        results: the window of each tensor that it returns; None for a tensor that was passed in.
        reads: cells whose previous content the operation depends on.
        replaces: cells that it overwrites completely.
        default_dtype: torch's default dtype at that time.
        draw: for a random operation.
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
        """All cells that it touches."""
        found = {result.cell for result in self.results if result is not None}
        map_args(Window, lambda window: found.add(window.cell), (self.args, self.kwargs))
        return frozenset(found)


class Tape:
    """All entries in order, and all cells.

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
        """The cell of a new stand-in (a meta tensor), for memory on `device`."""
        storage = tensor.untyped_storage()
        return self._cells.setdefault(id(storage), Cell(storage, device))

    def cell_of(self, tensor: torch.Tensor) -> Cell | None:
        """The cell of a stand-in; None for any other tensor."""
        if is_lazy(tensor) or not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._cells.get(id(tensor.untyped_storage()))

    def window_of(self, tensor: torch.Tensor) -> Window | None:
        """The current window of a stand-in; None for any other tensor."""
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
        """Add an entry that wrote to, or created, these cells."""
        assert entry.time == self.now
        self.entries.append(entry)
        for cell in set(written):
            cell.writes.append(entry.time)

    def needed(self, cells: Iterable[Cell], time: int) -> list[Entry]:
        """The entries, in order, that restore what `cells` held at `time`, without writes that were overwritten
        later."""
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
