"""`Item`: one tensor that a plan publishes, and which ranks have parts of it. Layer: transfer."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from fsdp2.placement.box import Box
from fsdp2.placement.tiling import Tiling


class Meta(NamedTuple):
    """What a consumer gets: its name, its dtype, and the shape of the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """A tensor of the plan.

    Attributes:
        key: its name in the model.
        tiling: how it is cut over the global ranks.
    """

    meta: Meta
    key: str
    tiling: Tiling

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, as it travels."""
        numel = 1
        for size in self.meta.shape:
            numel *= size
        return numel * self.meta.dtype.itemsize


def ranks_for(items: Iterable[Item], rank: int) -> tuple[int, ...]:
    """The ranks that together hold every tensor whole: those that differ from `rank` along cut axes. Replicas have
    ranks of their own."""
    found = {rank}
    for tiling in dict.fromkeys(item.tiling for item in items):
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
    return min((item.tiling.grid.sorted_ranks[0] for item in items), default=rank)


@lru_cache(maxsize=1024)
def holders(tiling: Tiling, ranks: tuple[int, ...]) -> tuple[tuple[int, Box], ...]:
    """(index in `ranks`, box) of those that give the parts of a tensor: the first of those with the same part."""
    found: dict[Box, int] = {}
    for index, rank in enumerate(ranks):
        box = tiling.box_of(rank)
        if box is not None and (box.numel or not tiling.shape):
            found.setdefault(box, index)
    return tuple((index, box) for box, index in found.items())
