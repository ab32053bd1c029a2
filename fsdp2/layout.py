"""Pure geometry: how a tensor is split over ranks, and how several share one buffer. No tensor, no process group.

A tensor is split like `torch.chunk`: ``ceil(size / parts)`` entries along the shard dim in every chunk, except that the
last non-empty one may be smaller; chunks after it are empty. The larger chunks on a smaller mesh follow the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any


@dataclass(frozen=True)
class _Bounds(Sequence[int]):
    """The start of each of `parts` chunks of ``range(size)``, then the end; times `scale`. Computed on access, because
    a rank needs only two of them."""

    size: int
    parts: int
    scale: int = 1

    def __len__(self) -> int:
        return self.parts + 1

    def __getitem__(self, index: Any) -> Any:
        found = range(self.parts + 1)[index]
        if isinstance(found, range):
            return [self[each] for each in found]
        return min(found * -(-self.size // self.parts), self.size) * self.scale


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch computes them (a dim of size 0 counts as 1)."""
    result = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        result[dim] = result[dim + 1] * max(shape[dim + 1], 1)
    return tuple(result)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims from the outermost in memory to the innermost. A dense tensor that is permuted this way is contiguous.
    The order is unchanged for a contiguous tensor, and for one with gaps or overlapping elements.

    >>> memory_order((2, 3, 4, 4), (48, 1, 12, 3))  # channels_last
    (0, 2, 3, 1)
    """
    as_is = tuple(range(len(shape)))
    order = tuple(sorted(as_is, key=lambda dim: -stride[dim]))
    dense = strides([shape[dim] for dim in order])
    for candidate, expected in ((as_is, strides(shape)), (order, dense)):
        if all(stride[dim] == at or shape[dim] == 1 for dim, at in zip(candidate, expected, strict=True)):
            return candidate
    return as_is


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a copy of such a tensor that has no gaps and the same memory order."""
    order = memory_order(shape, stride)
    dense = strides([shape[dim] for dim in order])
    return tuple(dense[order.index(dim)] for dim in range(len(shape)))


def pack(sizes_bytes: Sequence[int], align: int) -> tuple[tuple[int, ...], int]:
    """The byte offset of each piece when laid end to end, each start rounded up to `align`, and the total size.

    >>> pack([10, 4], 8)
    ((0, 16), 24)
    """
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // align) * align
    return tuple(offsets), end


@dataclass(frozen=True)
class ShardLayout:
    """A tensor of `shape` cut along `dim` into `parts` chunks."""

    shape: tuple[int, ...]
    dim: int
    parts: int

    @cached_property
    def chunk(self) -> int:
        """Entries along the shard dim of a full chunk."""
        return -(-self.shape[self.dim] // self.parts)

    @cached_property
    def bounds(self) -> Sequence[int]:
        """Start of each chunk along the shard dim, then the end: for 3 entries in 4 parts 0, 1, 2, 3, 3."""
        return _Bounds(self.shape[self.dim], self.parts)

    @cached_property
    def even(self) -> bool:
        """Whether all chunks have the same size."""
        return self.shape[self.dim] % self.parts == 0

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one entry along the shard dim."""
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @cached_property
    def padded_numel(self) -> int:
        """Elements of a full chunk, for which every rank has storage."""
        return self.chunk * self.row_numel

    @cached_property
    def flat_bounds(self) -> Sequence[int]:
        """Start of each rank's elements in the flattened tensor; they are contiguous only when `dim` is 0."""
        assert self.dim == 0
        return _Bounds(self.shape[0], self.parts, self.row_numel)

    def over(self, parts: int) -> "ShardLayout":
        """The same tensor and dim cut into another number of chunks."""
        return ShardLayout(self.shape, self.dim, parts)

    def local_size(self, rank: int) -> int:
        """Entries along the shard dim of chunk `rank`."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of chunk `rank`; for an empty one the shard dim is 0."""
        return (*self.shape[: self.dim], self.local_size(rank), *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Elements of chunk `rank`."""
        return self.local_size(rank) * self.row_numel


class Lane(Enum):
    """How a parameter is passed to a collective."""

    DIRECT = "direct"  # its own contiguous tensors are the operands; no copies
    PACKED = "packed"  # shares one buffer with others, with copy-in and copy-out


def choose_lane(layout: ShardLayout, itemsize: int, min_bytes: int | None, allows_uneven: bool) -> Lane:
    """The lane of a parameter with `itemsize` bytes per element on the wire. `min_bytes`: the smallest shard that is
    worth a separate message; None where only the packed lane works. `allows_uneven`: ranks may own different numbers
    of elements of one operand."""
    if layout.parts == 1:
        return Lane.DIRECT  # nothing is sent
    if min_bytes is None or layout.dim != 0 or not (layout.even or allows_uneven):
        return Lane.PACKED
    return Lane.DIRECT if layout.padded_numel * itemsize >= min_bytes else Lane.PACKED
