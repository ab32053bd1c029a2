"""Boxes: rectangular parts of a tensor in its global coordinates, the only record of sharding in a checkpoint. Pure.

A reader with any world size intersects the box that it needs with the boxes in the files. The mesh, placements and
their order, which determined the boxes, do not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from fsdp2.errors import CorruptError
from fsdp2.layout import strides


class Box(NamedTuple):
    """The elements ``start[d] <= index[d] < start[d] + shape[d]`` in every dim `d`.

    >>> Box((2, 0), (2, 5)).intersect(Box((3, 1), (9, 2)))
    Box(start=(3, 1), shape=(1, 2))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)  # 1 for an empty shape

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, or None. (Two 0-dim boxes always share their one element.)"""
        if self is other or self == other:  # by far the most frequent case
            return self if self.numel or not self.shape else None
        start = tuple(max(pair) for pair in zip(self.start, other.start, strict=True))
        end = tuple(min(pair) for pair in zip(self.end, other.end, strict=True))
        if any(low >= high for low, high in zip(start, end, strict=True)):
            return None
        return Box(start, tuple(high - low for low, high in zip(start, end, strict=True)))

    def within(self, outer: "Box") -> "Box":
        """The same elements in coordinates relative to `outer`."""
        return Box(tuple(own - base for own, base in zip(self.start, outer.start, strict=True)), self.shape)

    def split_until(self, fits: Callable[["Box"], bool]) -> Iterator["Box"]:
        """The box in parts that fit, in row-major order. Repeatedly halves the outermost dim that can be halved. A
        single element counts as fitting.

        >>> list(Box((0,), (3,)).split_until(lambda box: box.numel <= 2))
        [Box(start=(0,), shape=(1,)), Box(start=(1,), shape=(2,))]
        """
        if self.numel <= 1 or fits(self):
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        half = self.shape[dim] // 2
        for start, size in ((0, half), (half, self.shape[dim] - half)):
            begin = (*self.start[:dim], self.start[dim] + start, *self.start[dim + 1 :])
            yield from Box(begin, (*self.shape[:dim], size, *self.shape[dim + 1 :])).split_until(fits)

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The ranges of row-major indices of these elements in a tensor of `shape`, in order.

        >>> list(Box((1, 1), (2, 2)).runs((3, 4)))
        [(5, 7), (9, 11)]
        """
        one = flat_range(self, shape)
        if one is not None:
            yield one
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size != 1)
        for index in range(self.shape[dim]):
            start = (*self.start[:dim], self.start[dim] + index, *self.start[dim + 1 :])
            yield from Box(start, (*self.shape[:dim], 1, *self.shape[dim + 1 :])).runs(shape)

    def slices(self) -> tuple[slice, ...]:
        """The index of these elements in a tensor that begins at 0."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def flat_range_within(box: Box, outer: Box) -> tuple[int, int] | None:
    """The range of row-major indices of `box` within `outer`, if they are contiguous there; else None."""
    return (0, box.numel) if box is outer or box == outer else flat_range(box.within(outer), outer.shape)


def flat_range(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """The range of row-major indices of `box` in a tensor of `shape`, if they are contiguous there; else None.

    >>> flat_range(Box((1, 0), (2, 4)), (3, 4))
    (4, 12)
    """
    if not box.numel:
        return (0, 0)
    if box.shape == tuple(shape):
        return (0, box.numel)
    outermost = next((dim for dim, size in enumerate(box.shape) if size != 1), len(shape))
    if any(box.shape[dim] != shape[dim] for dim in range(outermost + 1, len(shape))):
        return None
    first = sum(start * step for start, step in zip(box.start, strides(shape), strict=True))
    return first, first + box.numel


def boxes_of_flat_range(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes that make up elements ``start..end`` of a tensor in row-major order; at most ``2 * len(shape) - 1``.

    >>> list(boxes_of_flat_range((3, 4), 2, 8))
    [Box(start=(0, 2), shape=(1, 2)), Box(start=(1, 0), shape=(1, 4))]
    """
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, into = divmod(start, row)
    last, rest = divmod(end, row)
    if into or first == last:
        stop = min(row, end - first * row)
        for box in boxes_of_flat_range(shape[1:], into, stop):
            yield Box((first, *box.start), (1, *box.shape))
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if rest and first <= last:
        for box in boxes_of_flat_range(shape[1:], 0, rest):
            yield Box((last, *box.start), (1, *box.shape))


class Cover:
    """Checks that boxes cover a box exactly, without gaps or overlaps.

    Args:
        box: the box to cover. All added boxes must lie within it.
    """

    def __init__(self, box: Box):
        self._box = box
        self._parts: list[Box] = []

    def add(self, part: Box) -> None:
        """Add a box."""
        self._parts.append(part)

    @property
    def missing(self) -> int:
        """The number of elements that are not covered, assuming that no boxes overlap."""
        return self._box.numel - sum(part.numel for part in self._parts)

    def check(self, what: str) -> None:
        """Check that the box is covered.

        Args:
            what: the name of the tensor and where it is, for messages.

        Raises:
            CorruptError: a part is missing or covered twice.
        """
        if self._parts == [self._box]:  # by far the most frequent case
            return
        parts = [part for part in self._parts if part.numel]
        if _is_sum(self._box, parts):
            return
        wanted = f"{list(self._box.start)}..{list(self._box.end)}"
        if self.missing > 0:
            raise CorruptError(
                f"{what} {wanted}: the files hold {self._box.numel - self.missing} of {self._box.numel} elements"
            )
        raise CorruptError(f"{what} {wanted}: its {len(parts)} parts overlap")


# The most dims along which `_is_sum` can check splits. Meshes have no more axes.
MAX_CUT_DIMS = 8


def _is_sum(box: Box, parts: list[Box]) -> bool:
    """Whether the parts cover the box exactly. The time is linear in their number, whatever their arrangement.

    The function that is 1 on a box and 0 elsewhere is determined by its corners: +1 at corners that are an upper end
    along an even number of dims, -1 at the others (its difference along every dim). So parts cover a box exactly if and
    only if the sum of their corners equals the corners of the box.
    """
    dims = [
        dim
        for dim in range(len(box.shape))
        if any((part.start[dim], part.shape[dim]) != (box.start[dim], box.shape[dim]) for part in parts)
    ]
    if len(dims) > MAX_CUT_DIMS or not box.numel:
        return not box.numel and not parts
    corners: dict[tuple[int, ...], int] = {}
    for part, sign in [(box, -1), *((part, 1) for part in parts)]:
        ends = [(part.start[dim], part.start[dim] + part.shape[dim]) for dim in dims]
        for which in product((0, 1), repeat=len(dims)):
            corner = tuple([pair[side] for pair, side in zip(ends, which, strict=True)])
            corners[corner] = corners.get(corner, 0) + (-sign if sum(which) % 2 else sign)
    return not any(corners.values())
