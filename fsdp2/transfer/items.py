"""`Item`: one tensor that a plan publishes, the pieces of the model that make it up, and the ranks that have them.
Layer: transfer.

A piece is a rectangle of a tensor of the model, perhaps transposed; usually it is the whole tensor. The stacked experts
of a transformers model are published one by one::

    gate_up [experts, 2 * hidden, dim]  -->  experts.3.w1 [hidden, dim]     region [3:4, :hidden, :], dims (1, 2)
                                             experts.3.w3 [hidden, dim]     region [3:4, hidden:, :], dims (1, 2)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from fsdp2.placement.box import Box, whole
from fsdp2.placement.tiling import Tiling


class Meta(NamedTuple):
    """What a consumer gets: name, dtype, and shape of the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of the model that forms a part of a published tensor.

    Attributes:
        key: the tensor's name in the model.
        tiling: how it is split over the global ranks.
        region: the part.
        dims: the dims of the model's tensor that become those of the published one. The region has size 1 in others.
        at: where the piece begins in the published tensor.
    """

    key: str
    tiling: Tiling
    region: Box
    dims: tuple[int, ...]
    at: tuple[int, ...]

    def outside(self, box: Box | None) -> Box | None:
        """The box in the published tensor for a box in the model's tensor; None if that does not meet the region."""
        common = None if box is None else box.intersect(self.region)
        if common is None:
            return None
        start = (at + common.start[dim] - self.region.start[dim] for at, dim in zip(self.at, self.dims, strict=True))
        return Box(tuple(start), tuple(common.shape[dim] for dim in self.dims))

    def local(self, tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
        """A view of the region's part of `tensor`, which holds `box`, with the dims in published order."""
        common = None if box is None else box.intersect(self.region)
        if box is None or common is None:
            return tensor.new_empty((0,) * len(self.dims))
        dropped = [dim for dim in range(tensor.ndim) if dim not in self.dims]
        found = tensor[common.within(box).slices()].permute((*self.dims, *dropped))
        for _ in dropped:
            found = found.select(-1, 0)
        return found


@dataclass(frozen=True)
class Item:
    """A tensor of the plan, and the pieces that make it up."""

    meta: Meta
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, as it is sent."""
        return prod(self.meta.shape) * self.meta.dtype.itemsize

    @property
    def is_cut(self) -> bool:
        """Whether a rank may lack a part of it."""
        return any(piece.tiling.cuts for piece in self.pieces)

    def sent(self, ranks: tuple[int, ...]) -> Iterator[tuple[int, int, Box]]:
        """(index in `ranks`, index of the piece, box in the published tensor) of all parts: each once, from the first
        rank that has it."""
        for number, piece in enumerate(self.pieces):
            for rank, own in _holders(piece.tiling, ranks):
                box = piece.outside(own)
                if box is not None:
                    yield rank, number, box


def item_of(meta: Meta, key: str, tiling: Tiling) -> Item:
    """The item for a whole tensor of the model."""
    return Item(meta, (Piece(key, tiling, whole(tiling.shape), tuple(range(len(meta.shape))), (0,) * len(meta.shape)),))


def ranks_for(items: Iterable[Item], rank: int) -> tuple[int, ...]:
    """The ranks that together hold every tensor once: `rank`, and those that differ from it only along sharded axes.
    Other replicas have other such ranks."""
    found = {rank}
    for tiling in dict.fromkeys(piece.tiling for item in items for piece in item.pieces):
        found.update(_slice_of(tiling, rank))
    return tuple(sorted(found))


@lru_cache(maxsize=1024)
def _slice_of(tiling: Tiling, rank: int) -> tuple[int, ...]:
    coordinates = tiling.grid.coordinates(rank)
    if coordinates is None:
        return ()
    cut = {axis for axis, _ in tiling.cuts}
    choices = [range(size) if axis in cut else (coordinates[axis],) for axis, size in enumerate(tiling.grid.shape)]
    return tuple(tiling.grid.rank_at(each) for each in product(*choices))


def first_of(items: Iterable[Item], rank: int) -> int:
    """The first of all ranks that have these tensors, replicas included."""
    return min((piece.tiling.grid.sorted_ranks[0] for item in items for piece in item.pieces), default=rank)


@lru_cache(maxsize=1024)
def _holders(tiling: Tiling, ranks: tuple[int, ...]) -> tuple[tuple[int, Box], ...]:
    """(index in `ranks`, box) of the ranks that provide the parts of a tensor: the first one with each part."""
    found: dict[Box, int] = {}
    for index, rank in enumerate(ranks):
        box = tiling.box_of(rank)
        if box is not None and (box.numel or not tiling.shape):
            found.setdefault(box, index)
    return tuple((index, box) for box, index in found.items())
