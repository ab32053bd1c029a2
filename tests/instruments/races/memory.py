"""What happened last to each byte, and which of two accesses nothing orders.

The address space is cut into *cells*, ranges of bytes with one history: who wrote them last, who read them on each
stream since then, and whether they have been filled. Addresses, not tensors: shards that were carved from one block
(`fsdp2.placement.carving`) have storages of their own on the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tests.instruments.races.clocks import Clock

__all__ = ["Memory", "Operation", "Stack", "ranges_of"]

Stack = tuple[tuple[str, int, str], ...]  # file, line, function; innermost first
MOST_RANGES = 4096


@dataclass(frozen=True, slots=True)
class Operation:
    """What a stream was given.

    Attributes:
        name: of the operator.
        stream: where it was enqueued.
        tick: the stream's own count after it.
        stack: where the host was.
    """

    name: str
    stream: str
    tick: int
    stack: Stack

    def is_before(self, clock: Clock) -> bool:
        """Whether an agent with this clock has waited for it."""
        return clock.get(self.stream, 0) >= self.tick


class Cell:
    """The history of a range of bytes since it was allocated."""

    __slots__ = ("filled", "readers", "writer")

    def __init__(self, writer: Operation | None, filled: bool):
        self.writer = writer
        self.readers: dict[str, Operation] = {}
        self.filled = filled

    def copy(self) -> Cell:
        other = Cell(self.writer, self.filled)
        other.readers = dict(self.readers)
        return other

    @property
    def accesses(self) -> list[Operation]:
        """All that a write must come after."""
        return [*self.readers.values(), *([] if self.writer is None else [self.writer])]


class Memory:
    """The cells. Cell i covers the addresses from ``starts[i]`` up to ``starts[i + 1]``; None if nothing is known."""

    def __init__(self) -> None:
        self._starts = [0]
        self._cells: list[Cell | None] = [None]

    def allocate(self, start: int, end: int, filled: bool, allocation: Operation | None = None) -> None:
        """These addresses belong to a new block. A write must come after its `allocation`: before, the stream on which
        it was allocated may have used the memory for something else."""
        self._put(start, end, Cell(allocation, filled))

    def free(self, start: int, end: int) -> list[Operation]:
        """These addresses belong to nobody. Returns the last accesses."""
        accesses = {access for cell in self._over(start, end) if cell is not None for access in cell.accesses}
        self._put(start, end, None)
        return list(accesses)

    def is_known(self, start: int, end: int) -> bool:
        """Whether a block covers some of these addresses."""
        return any(cell is not None for cell in self._over(start, end))

    def read(self, start: int, end: int, operation: Operation, clock: Clock) -> Iterator[tuple[Operation | None, int]]:
        """`operation`, which comes after `clock`, reads these addresses. Yields the writes that it does not come after,
        or None for bytes that nobody has filled; and how many bytes."""
        for index in self._indices(start, end):
            cell = self._cells[index]
            if cell is None:
                cell = self._cells[index] = Cell(None, True)
            if not cell.filled:
                yield None, self._starts[index + 1] - self._starts[index]
            elif cell.writer is not None and not cell.writer.is_before(clock):
                yield cell.writer, self._starts[index + 1] - self._starts[index]
            cell.readers[operation.stream] = operation

    def write(self, start: int, end: int, operation: Operation, clock: Clock) -> Iterator[tuple[Operation, int]]:
        """The same for a write. Yields the accesses that it does not come after."""
        for index in self._indices(start, end):
            cell = self._cells[index]
            for access in () if cell is None else cell.accesses:
                if not access.is_before(clock):
                    yield access, self._starts[index + 1] - self._starts[index]
        self._put(start, end, Cell(operation, True))

    def _over(self, start: int, end: int) -> list[Cell | None]:
        return [self._cells[index] for index in self._indices(start, end)]

    def _indices(self, start: int, end: int) -> range:
        return range(self._cut(start), self._cut(end))

    def _put(self, start: int, end: int, cell: Cell | None) -> None:
        first, last = self._cut(start), self._cut(end)
        if cell is None and first and self._cells[first - 1] is None:
            self._starts[first:last], self._cells[first:last] = [], []
        else:
            self._starts[first:last], self._cells[first:last] = [start], [cell]

    def _cut(self, at: int) -> int:
        """The index of the cell that begins at this address."""
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        cell = self._cells[index]
        self._starts.insert(index + 1, at)
        self._cells.insert(index + 1, None if cell is None else cell.copy())
        return index + 1


def ranges_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The addresses of a strided tensor's elements: (first, end), as few as possible. If there are thousands, one range
    with the gaps."""
    if not tensor.numel():
        return []
    itemsize, start = tensor.itemsize, tensor.data_ptr()
    if tensor.is_contiguous():
        return [(start, start + tensor.numel() * itemsize)]
    dims = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride
    )
    run, outer = 1, []
    for stride, size in dims:
        if stride == run:
            run *= size
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = outer[-1][0], outer[-1][1] * size
        else:
            outer.append((stride, size))
    count = 1
    for _, size in outer:
        count *= size
    if count > MOST_RANGES:
        return [(start, start + (sum(stride * (size - 1) for stride, size in outer) + run) * itemsize)]
    offsets = (sum(at) for at in product(*(range(0, stride * size, stride) for stride, size in outer)))
    return [(start + offset * itemsize, start + (offset + run) * itemsize) for offset in offsets]
