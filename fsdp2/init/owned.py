"""Which elements of a tensor a rank owns, and where they are within spans of it. Pure geometry. Layer: init.

In each dim, a rank owns one or more intervals: one for any nesting of `Shard`, and for FSDP on top of TP on the same
dim (expressed by `_StridedShard`); several for a `_StridedShard` alone. The rank owns the product of its intervals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from torch.distributed.tensor import DTensor

from fsdp2.errors import UnsupportedError
from fsdp2.layout import chunk_bounds

__all__ = ["Box", "Cut", "Interval", "Owned", "boxes", "owned_of", "spans"]

Interval = tuple[int, int]  # start, stop
Box = tuple[Interval, ...]  # one interval for each dim


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts a tensor.

    Attributes:
        dim: of the tensor.
        parts: the size of the axis.
        index: of this rank on the axis; None for a rank that is not in the mesh.
        before: None for `Shard`. For `_StridedShard` its split factor: the number of pieces of `dim` before this cut.
    """

    dim: int
    parts: int
    index: int | None
    before: int | None = None


@dataclass(frozen=True)
class Owned:
    """The elements of a tensor of `shape` that one rank owns: the product of the `intervals` of each dim. These are not
    empty, do not touch each other, and ascend."""

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], cuts: Sequence[Cut]) -> "Owned":
        """What this rank owns after all cuts, which are given in the order of the mesh's axes."""
        intervals = []
        for dim, size in enumerate(shape):
            kept: list[Interval] = [(0, size)]
            for cut in _in_order([cut for cut in cuts if cut.dim == dim and cut.parts > 1]):
                kept = _cut(kept, cut)
            intervals.append(tuple(_joined(kept)))
        return cls(tuple(shape), tuple(intervals))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds these elements."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.intervals)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the rank owns everything."""
        return self.local_shape == self.shape

    def permuted(self, order: Sequence[int]) -> "Owned":
        """The same elements for the tensor with its dims permuted."""
        return Owned(tuple(self.shape[dim] for dim in order), tuple(self.intervals[dim] for dim in order))

    def within(self, box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The parts of `box` that the rank owns: their place in the box, and their place in the rank's local tensor."""
        dims = [list(_overlaps(intervals, at)) for intervals, at in zip(self.intervals, box, strict=True)]
        for parts in product(*dims):
            yield tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def index_of(self, dim: int, position: int) -> int | None:
        """The index of entry `position` of `dim` in the local tensor; None if the rank does not own it."""
        before = 0
        for start, stop in self.intervals[dim]:
            if start <= position < stop:
                return before + position - start
            before += stop - start
        return None


def owned_of(tensor: DTensor, local_shape: Sequence[int]) -> Owned:
    """What this rank owns of a DTensor. No communication.

    Args:
        local_shape: of its local tensor, which must hold exactly that.

    Raises:
        UnsupportedError: a partial DTensor, or placements whose local tensors have another shape.
    """
    cuts = []
    coordinate = tensor.device_mesh.get_coordinate()
    for axis, placement in enumerate(tensor.placements):
        dim: int | None = getattr(placement, "dim", None)
        if placement.is_replicate():
            continue
        if placement.is_partial() or dim is None:
            raise UnsupportedError(
                f"random values for a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}: "
                "expected Shard or Replicate on every axis of its mesh; redistribute it first"
            )
        index = None if coordinate is None else coordinate[axis]
        cuts.append(Cut(dim, tensor.device_mesh.size(axis), index, getattr(placement, "split_factor", None)))
    if coordinate is None:
        return Owned(tuple(tensor.shape), ((),) * tensor.ndim)
    owned = Owned.of(tensor.shape, cuts)
    if owned.local_shape != tuple(local_shape):
        raise UnsupportedError(
            f"random values for a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}: expected "
            f"a local tensor of shape {owned.local_shape}, which this rank owns by these, got {tuple(local_shape)}"
        )
    return owned


def spans(numel: int, size: int, least: int) -> Iterator[Interval]:
    """`range(numel)` in spans of `size`. The last span may be longer or shorter, so that none is shorter than `least`
    (unless `numel` is)."""
    start = 0
    while start < numel:
        stop = start + size if numel - start - size >= least else numel
        yield start, stop
        start = stop


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` of a contiguous tensor as boxes, which follow each other in memory. At most two
    per dim, and one more.

    >>> list(boxes((3, 4), 2, 9))  # the end of row 0, row 1, the start of row 2
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if tail:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], start, stop):
        yield ((row, row + 1), *box)


def _in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts in the order in which they are applied. An axis is applied after those to its right if its split factor
    is the product of their sizes. With any other split factor it keeps its place, and cuts as `_StridedShard` defines
    it."""
    if not cuts:
        return []
    first, rest = cuts[0], cuts[1:]
    if rest and first.before == prod(cut.parts for cut in rest):
        return [*_in_order(rest), Cut(first.dim, first.parts, first.index)]
    return [first, *_in_order(rest)]


def _cut(kept: list[Interval], cut: Cut) -> list[Interval]:
    """This rank's chunk of the entries in `kept`; with a split factor n, its chunk of each of n chunks."""
    assert cut.index is not None
    size = sum(stop - start for start, stop in kept)
    result: list[Interval] = []
    outer = chunk_bounds(size, cut.before or 1)
    for start, stop in pairwise(outer):
        inner = chunk_bounds(stop - start, cut.parts)
        result += _section(kept, start + inner[cut.index], start + inner[cut.index + 1])
    return result


def _section(kept: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """The entries numbered `start` to `stop` of those in `kept`."""
    result = []
    before = 0
    for first, last in kept:
        low, high = max(first, first + start - before), min(last, first + stop - before)
        if low < high:
            result.append((low, high))
        before += last - first
    return result


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def _overlaps(intervals: Sequence[Interval], at: Interval) -> Iterator[tuple[slice, slice]]:
    """The overlaps of `at` with each interval: their place in `at`, and in the intervals laid end to end."""
    before = 0
    for start, stop in intervals:
        low, high = max(start, at[0]), min(stop, at[1])
        if low < high:
            yield slice(low - at[0], high - at[0]), slice(before + low - start, before + high - start)
        before += stop - start
