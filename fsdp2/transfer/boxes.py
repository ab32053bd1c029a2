"""Parts of tensors: those that each rank holds, and those that consumers want. No communication. Layer: transfer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box, whole
from fsdp2.transfer.items import Item


class Place(NamedTuple):
    """A rank's part of a tensor: the elements ``start[d] <= index[d] < start[d] + local_shape[d]`` of the whole.

    Attributes:
        shape: the shape of the whole tensor.
        rank: the global rank that holds the part.
        is_primary: this is the first of the ranks that hold the same part, so only it need send.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local_shape: tuple[int, ...]
    rank: int
    is_primary: bool


class Wanted(NamedTuple):
    """A slice of a whole tensor that a consumer wants. `consumer`: its number, chosen by the caller."""

    name: str
    consumer: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A part of a wanted slice.

    Attributes:
        start: where it begins in the wanted slice.
        tensor: the values; a view of this rank's shard if that has the dtype.
        wanted: the index of the wanted slice.
    """

    name: str
    consumer: int
    start: tuple[int, ...]
    tensor: torch.Tensor
    wanted: int


def boxes_of(items: Iterable[Item], rank: int) -> list[Place]:
    """See `Weights.boxes`."""
    found = []
    for item in items:
        for piece in item.pieces:
            box = piece.outside(piece.tiling.box_of(rank))
            if box is not None:
                name, dtype, shape = item.meta
                found.append(Place(name, dtype, shape, box.start, box.shape, rank, piece.tiling.owns(rank)))
    return found


def box_of(wanted: Wanted) -> Box:
    """The box of a wanted slice in the whole tensor."""
    return Box(tuple(wanted.start), tuple(wanted.shape))


def parts_for(
    wanted: Sequence[Wanted], items: Mapping[str, Item], rank: int
) -> Iterator[tuple[Wanted, int, int, Box, Box]]:
    """What `rank` sends: the wanted slice, its index, the piece's index, the box that the rank holds, and the common
    part."""
    for index, each in enumerate(wanted):
        item, box = items[each.name], box_of(each)
        shape = item.meta.shape
        if len(each.start) != len(shape) or len(each.shape) != len(shape) or box.intersect(whole(shape)) != box:
            raise ArgumentError(f"send_boxes: {each} is not within '{each.name}', which has shape {shape}")
        for number, piece in enumerate(item.pieces):
            own = piece.outside(piece.tiling.box_of(rank)) if piece.tiling.owns(rank) else None
            common = None if own is None else own.intersect(box)
            if own is not None and common is not None:
                yield each, index, number, own, common
