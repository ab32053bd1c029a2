"""Where a part of a tensor is in a file. Layer: checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp2.placement.box import Box, boxes_of_flat_range, flat_range

__all__ = ["StoredPiece", "StoredTensorInfo", "runs_within"]


class StoredTensorInfo(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: its name in safetensors.
        shape: the shape of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class StoredPiece:
    """A part of a tensor, somewhere in a file, row-major.

    Attributes:
        path: the path of the file in the storage.
        offset: where the container begins in the file.
        container: the part of the whole tensor that is stored at `offset` without gaps.
        box: this piece's part of the container (all of it, except in consolidated files).
        dtype: its name in safetensors.
        sums: checksums of the blocks of the row-major bytes of `box`, joined; "" if there are none.
    """

    path: str
    offset: int
    container: Box
    box: Box
    dtype: str
    sums: str = ""


def runs_within(box: Box, container: Box, itemsize: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The contiguous runs in the container that make up bytes ``start..end`` of a box's values, in order: (first byte,
    number of bytes)."""
    within = box.within(container)
    place = flat_range(within, container.shape)
    if place is not None:
        yield place[0] * itemsize + start, end - start
        return
    for part in boxes_of_flat_range(box.shape, start // itemsize, end // itemsize):
        moved = Box(tuple(a + b for a, b in zip(part.start, within.start, strict=True)), part.shape)
        yield from ((low * itemsize, (high - low) * itemsize) for low, high in moved.runs(container.shape))
