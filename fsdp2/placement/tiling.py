"""How a tensor is split over the ranks of a mesh, as plain numbers that a file can hold. Pure except for `tiling_of`.

A tiling is a sequence of cuts, outermost first. Each says that the ranks along a mesh axis split their part along a
dim, by the rule of `torch.chunk`. This replaces a table of ranks and chunks, so a manifest stays small, and a reader
finds the owners of a part by division instead of searching.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp2._torch import local_tensor
from fsdp2._torch.shared import shard_dim, split_factor
from fsdp2.errors import ArgumentError
from fsdp2.layout import strides
from fsdp2.placement.box import Box, whole

# Smaller shards are written by the first of their replicas. Larger ones are split further, so that all replicas write.
SPREAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh. Tensors share it, so that results that depend on the number of ranks are computed only once.

    Attributes:
        shape: its size along each axis.
        ranks: global ranks, row-major.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def sorted_ranks(self) -> tuple[int, ...]:
        """The ranks in ascending order."""
        return tuple(sorted(self.ranks))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """The rank at a position."""
        return self.ranks[sum(at * step for at, step in zip(coordinates, strides(self.shape), strict=True))]

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """The position of a rank; None if it is not in the mesh."""
        index = self._indices.get(rank)
        if index is None:
            return None
        return tuple(index // step % size for step, size in zip(strides(self.shape), self.shape, strict=True))


@dataclass(frozen=True)
class Tiling:
    """A tensor of `shape` split over a grid.

    Attributes:
        cuts: (axis of the grid, dim of the tensor), the outermost cut first. Along axes without a cut all ranks hold
            the same, and the ranks at position 0 are the owners.
    """

    shape: tuple[int, ...]
    grid: Grid
    cuts: tuple[tuple[int, int], ...] = ()

    def box_at(self, coordinates: Sequence[int]) -> Box:
        """The box of the rank at a position of the grid."""
        at = tuple(coordinates)
        if at not in self._boxes:
            box = whole(self.shape)
            for axis, dim in self.cuts:
                box = _chunk(box, dim, self.grid.shape[axis], at[axis])
            self._boxes[at] = box
        return self._boxes[at]

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], Box]:
        return {}

    def box_of(self, rank: int) -> Box | None:
        """The box of `rank`; None if the rank is not in the grid."""
        coordinates = self.grid.coordinates(rank)
        return None if coordinates is None else self.box_at(coordinates)

    @cached_property
    def free_axes(self) -> tuple[int, ...]:
        """The axes without a cut, along which all ranks hold the same."""
        cut = {axis for axis, _ in self.cuts}
        return tuple(axis for axis in range(len(self.grid.shape)) if axis not in cut)

    def owns(self, rank: int) -> bool:
        """Whether `rank` is the one that writes its box."""
        coordinates = self.grid.coordinates(rank)
        return coordinates is not None and not any(coordinates[axis] for axis in self.free_axes)

    def written_by(self, rank: int) -> Box | None:
        """The box that `rank` writes: its own, if it is the owner and the box is not empty (or the whole tensor is)."""
        if rank not in self._written:
            box = self.box_of(rank)
            is_any = box is not None and (box.numel or not prod(self.shape))
            self._written[rank] = box if is_any and self.owns(rank) else None
        return self._written[rank]

    @cached_property
    def _written(self) -> dict[int, Box | None]:
        return {}

    def owners(self, wanted: Box) -> Sequence[tuple[int, Box]]:
        """(rank, its box) of all owners whose boxes intersect `wanted`, in time proportional to their number. Cached
        for all tensors of this kind."""
        if wanted not in self._owned:
            self._owned[wanted] = [*self._owners(wanted, whole(self.shape), 0, [0] * len(self.grid.shape))]
        return self._owned[wanted]

    @cached_property
    def _owned(self) -> dict[Box, Sequence[tuple[int, Box]]]:
        return {}

    def _owners(self, wanted: Box, box: Box, depth: int, coordinates: list[int]) -> Iterator[tuple[int, Box]]:
        if depth == len(self.cuts):
            if box.intersect(wanted) is not None:
                yield self.grid.rank_at(coordinates), box
            return
        axis, dim = self.cuts[depth]
        parts = self.grid.shape[axis]
        size = -(-box.shape[dim] // parts)
        if not size:
            return
        low, high = wanted.start[dim] - box.start[dim], wanted.end[dim] - box.start[dim]
        for index in range(max(low, 0) // size, min(-(-high // size), parts)):
            coordinates[axis] = index
            yield from self._owners(wanted, _chunk(box, dim, parts, index), depth + 1, coordinates)
        coordinates[axis] = 0


def _chunk(box: Box, dim: int, parts: int, index: int) -> Box:
    size = box.shape[dim]
    chunk = -(-size // parts)
    low, high = min(index * chunk, size), min((index + 1) * chunk, size)
    start = (*box.start[:dim], box.start[dim] + low, *box.start[dim + 1 :])
    return Box(start, (*box.shape[:dim], high - low, *box.shape[dim + 1 :]))


def replicated(shape: Sequence[int], ranks: Sequence[int]) -> Tiling:
    """The tiling of a tensor that all of these ranks hold completely."""
    return _replicated(tuple(shape), _row(tuple(ranks)))


@lru_cache(maxsize=64)
def _replicated(shape: tuple[int, ...], grid: Grid) -> Tiling:
    return Tiling(shape, grid)


@lru_cache(maxsize=64)
def _row(ranks: tuple[int, ...]) -> Grid:
    return Grid((len(ranks),), ranks)


def tiling_of(tensor: DTensor, name: str) -> Tiling:
    """The tiling of a DTensor, from its mesh and placements, without communication.

    Raises:
        ArgumentError: see `tiling_from`; or the local tensor's shape does not match the placements.
    """
    mesh = tensor.device_mesh
    tiling = tiling_from(mesh, tensor.placements, tensor.shape, name)
    coordinates = mesh.get_coordinate()
    local = tuple(local_tensor(tensor).shape)
    if coordinates is not None and tiling.box_at(coordinates).shape != local:
        raise ArgumentError(
            f"'{name}': the local tensor has shape {local}, but a tensor of shape {tuple(tensor.shape)} with "
            f"placements {tensor.placements} has {tiling.box_at(coordinates).shape} there. Make DTensors whose shards "
            "follow torch.chunk."
        )
    return tiling


def own_box(tensor: DTensor) -> Box:
    """This rank's box of a DTensor; an empty one if it is not in the mesh. No communication.

    Raises:
        ArgumentError: see `tiling_of`.
    """
    tiling = tiling_of(tensor, f"a DTensor of shape {tuple(tensor.shape)}")
    coordinates = tensor.device_mesh.get_coordinate()
    return Box((0,) * tensor.ndim, (0,) * tensor.ndim) if coordinates is None else tiling.box_at(coordinates)


def tiling_from(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], name: str) -> Tiling:
    """The tiling that placements on a mesh describe.

    Raises:
        ArgumentError: a placement is neither a shard nor a replica, such as a partial sum.
    """
    known = _tilings.setdefault(mesh, {})
    key = (tuple(placements), tuple(shape))
    if key not in known:
        known[key] = Tiling(tuple(shape), grid_of(mesh), tuple(_cuts(mesh, placements, shape, name)))
    return known[key]


# Cached: a model has many tensors of the same kind and is saved many times, and torch recomputes the ranks of a mesh in
# each access.
_tilings: WeakKeyDictionary[DeviceMesh, dict[Any, Tiling]] = WeakKeyDictionary()
_grids: WeakKeyDictionary[DeviceMesh, Grid] = WeakKeyDictionary()


def grid_of(mesh: DeviceMesh) -> Grid:
    """A mesh as plain numbers, computed once."""
    if mesh not in _grids:
        _grids[mesh] = Grid(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return _grids[mesh]


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], name: str) -> list[tuple[int, int]]:
    cuts: list[tuple[int, int]] = []
    later: list[tuple[int, tuple[int, int]]] = []  # cuts that come after others on the same dim: (split factor, cut)
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        factor = split_factor(placement)
        if factor is None:
            raise ArgumentError(
                f"'{name}': expected Shard or Replicate on every axis of its mesh, got {placement}, so no rank has "
                "its values. Redistribute it first."
            )
        cut = (axis, shard_dim(placement) % len(shape))
        if factor > 1:
            later.append((factor, cut))
        else:
            cuts.append(cut)
            later = _release(cuts, later, mesh.shape)
    if later:
        raise ArgumentError(f"'{name}': cannot determine the order of the shards of placements {tuple(placements)}")
    return cuts


def _release(
    cuts: list[tuple[int, int]], later: list[tuple[int, tuple[int, int]]], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, int]]]:
    """Append the postponed cuts whose outer cuts are complete; return the others. (The split factor of `_StridedShard`
    is the number of parts that mesh axes further right have cut before.)"""
    rest = []
    for factor, cut in reversed(later):
        parts = prod(sizes[axis] for axis, dim in cuts if dim == cut[1] and axis > cut[0])
        if parts == factor:
            cuts.append(cut)
        else:
            rest.append((factor, cut))
    return rest[::-1]


def with_siblings(tiling: Tiling, root: Grid, ranks: frozenset[int]) -> Tiling:
    """The tiling of the tensor on all meshes that hold it. A mesh that is part of a larger one (the data-parallel axes
    of a mesh with tensor parallelism) has siblings at the other positions of the missing axes, with the same values.

    Args:
        root: the larger mesh.
        ranks: the ranks that have the model. Siblings outside of them (other pipeline stages) may have a different
            tensor of the same name.
    """
    own = tiling.grid.ranks
    if len(own) >= len(ranks) or not set(own) <= set(root.ranks):
        return tiling
    places = [root.coordinates(rank) or () for rank in own]
    lacking = [axis for axis in range(len(root.shape)) if len({place[axis] for place in places}) == 1]
    siblings = []
    for others in product(*(range(root.shape[axis]) for axis in lacking)):
        moved = dict(zip(lacking, others, strict=True))
        mesh = [root.rank_at([moved.get(axis, at) for axis, at in enumerate(place)]) for place in places]
        if ranks.issuperset(mesh):
            siblings.append(mesh)
    if len(siblings) == 1:
        return tiling
    grid = Grid((len(siblings), *tiling.grid.shape), tuple(rank for mesh in siblings for rank in mesh))
    return Tiling(tiling.shape, grid, tuple((axis + 1, dim) for axis, dim in tiling.cuts))


def spread_replicas(tiling: Tiling, itemsize: int) -> Tiling:
    """Split large shards along all replicate axes too, so that each replica owns some of the rows. Every rank computes
    this without communication."""
    # Without replicas, don't use the cache: each lookup would hash the numbers of all ranks.
    return _spread(tiling, itemsize) if any(tiling.grid.shape[axis] > 1 for axis in tiling.free_axes) else tiling


@lru_cache(maxsize=1024)
def _spread(tiling: Tiling, itemsize: int) -> Tiling:
    free = [axis for axis in tiling.free_axes if tiling.grid.shape[axis] > 1]
    sizes = list(tiling.box_at((0,) * len(tiling.grid.shape)).shape)
    if prod(sizes) * itemsize < SPREAD_BYTES:
        return tiling
    cuts = list(tiling.cuts)
    for axis in free:
        parts = tiling.grid.shape[axis]
        dim = next((dim for dim, size in enumerate(sizes) if size >= parts), sizes.index(max(sizes)))
        sizes[dim] = -(-sizes[dim] // parts)
        cuts.append((axis, dim))
    return Tiling(tiling.shape, tiling.grid, tuple(cuts))
