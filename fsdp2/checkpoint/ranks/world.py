"""The ranks that save or load together, and where a rank's part of a tensor belongs. Layer: checkpoint."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2._torch.checkpoint import root_mesh
from fsdp2.checkpoint.schema.dtypes import name_of
from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box
from fsdp2.placement.tiling import Grid, Tiling, grid_of, tiling_of, with_siblings

__all__ = ["Entry", "Place", "World"]

# A mesh and its root mesh.
Meshes = tuple[DeviceMesh, DeviceMesh]


@dataclass(frozen=True)
class World:
    """The ranks that save or load together.

    Attributes:
        rank: this rank, counted within the group.
        ranks: their global ranks.
    """

    rank: int
    ranks: tuple[int, ...]
    _grids: dict[Grid, Grid] = field(default_factory=dict, compare=False)
    # The values keep the objects alive whose ids are in the keys.
    _places: dict[Any, tuple["Place", object]] = field(default_factory=dict, compare=False)
    _meshes: dict[int, tuple[Meshes, DeviceMesh]] = field(default_factory=dict, compare=False)
    _equal_meshes: dict[Meshes, Meshes] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def grid(self, grid: Grid, name: str) -> Grid:
        """A grid with its ranks counted within this group."""
        if grid not in self._grids:
            self._grids[grid] = self._numbered(grid, name)
        return self._grids[grid]

    def place(self, tensor: DTensor, name: str, ranks: tuple[int, ...]) -> "Place":
        """Where this rank's part of a DTensor belongs, in a model on `ranks`. Cached, because models have many tensors
        of the same kind."""
        meshes = self.first_equal(tensor.device_mesh)
        # Ids, not meshes and ranks: hashing thousands of ranks per tensor would take as long as everything else.
        key = (id(meshes), id(ranks), tensor.placements, tensor.shape, local_tensor(tensor).shape)
        if key not in self._places:
            self._places[key] = self._place(tensor, name, ranks), ranks
        return self._places[key][0]

    def first_equal(self, mesh: DeviceMesh) -> Meshes:
        """The mesh and its root mesh, or equal ones of an earlier tensor: without `mesh=`, each call of `fully_shard`
        makes a mesh, and torch may give results of operators the mesh of an earlier one."""
        if id(mesh) not in self._meshes:
            both = (mesh, root_mesh(mesh))
            self._meshes[id(mesh)] = self._equal_meshes.setdefault(both, both), mesh
        return self._meshes[id(mesh)][0]

    def _place(self, tensor: DTensor, name: str, ranks: tuple[int, ...]) -> "Place":
        tiling = tiling_of(tensor, name)
        own, root = self.grid(tiling.grid, name), grid_of(root_mesh(tensor.device_mesh))
        if own is not tiling.grid:
            tiling = replace(tiling, grid=own)
        if len(own.ranks) < len(ranks) and set(root.ranks) <= set(self.ranks):
            tiling = with_siblings(tiling, self.grid(root, name), frozenset(ranks))
        has_siblings = len(own.ranks) < len(tiling.grid.ranks)
        copy = own.ranks.index(self.rank) if has_siblings and self.rank in own.ranks else None
        return Place(tiling, tiling.box_of(self.rank), copy)

    def _numbered(self, grid: Grid, name: str) -> Grid:
        if self.ranks == tuple(range(self.size)) and max(grid.ranks) < self.size:
            return grid
        positions = {rank: index for index, rank in enumerate(self.ranks)}
        try:
            return Grid(grid.shape, tuple(positions[rank] for rank in grid.ranks))
        except KeyError as error:
            raise ArgumentError(
                f"'{name}': its mesh has rank {error.args[0]}, which is not among the ranks {self.ranks} that save or "
                "load: pass a process_group with all ranks of the meshes"
            ) from error


class Place(NamedTuple):
    """Where a rank's part of a tensor belongs; see `Entry`. `box` is None if the rank has no part."""

    tiling: Tiling
    box: Box | None
    copy: int | None = None


class Entry(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: a plain tensor.
        tiling: how the whole tensor is split, in ranks of the `World`.
        box: the part that `local` holds.
        outside: the user's tensor.
        copy: this rank's index in the tensor's mesh, if other meshes are assumed to have the same values.
    """

    name: str
    local: torch.Tensor
    tiling: Tiling
    box: Box
    outside: torch.Tensor
    copy: int | None = None

    @property
    def dtype(self) -> str:
        """Its name in safetensors."""
        name = name_of(self.local.dtype)
        if name is None:
            raise ArgumentError(f"'{self.name}': safetensors has no dtype for {self.local.dtype}; convert the tensor")
        return name
