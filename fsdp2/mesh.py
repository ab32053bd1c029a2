"""What the axes of a DeviceMesh mean to us: the shard axis, the replicate axis, their groups. Layer: mesh.

========  ===========================  ===================
mesh      axes                         this is
========  ===========================  ===================
1-D       shard                        FSDP
2-D       replicate, shard (in order)  HSDP
========  ===========================  ===================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fsdp2._torch import DTensorSpec, make_spec
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.layout import strides

__all__ = ["MeshRoles", "ShardPlacementResult", "default_mesh", "roles_of"]

# Meshes to which units reshard after forward, by the mesh they were made from and by size: making one makes process
# groups, which all units of that mesh share.
_smaller_meshes: WeakKeyDictionary[DeviceMesh, dict[int, DeviceMesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: the dim to shard, and a mesh of the parameter's own.

    Attributes:
        placement: ``Shard(dim)``.
        mesh: 1-D or 2-D, with the same meaning as the `mesh` argument of `fully_shard`; None for that one.
    """

    placement: Shard
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class MeshRoles:
    """A mesh with the roles of its axes. Equal for equal meshes."""

    mesh: DeviceMesh
    replicate_axis: int | None
    shard_axis: int

    @cached_property
    def shard_size(self) -> int:
        """Ranks over which a parameter is cut."""
        return self.mesh.size(self.shard_axis)

    @cached_property
    def shard_rank(self) -> int:
        """Which shard is this rank's."""
        return self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold a parameter once."""
        return self.mesh.get_group(self.shard_axis)

    @cached_property
    def replicate_size(self) -> int:
        """How many times the parameters are held."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard as this one; None without a replicate axis."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @cached_property
    def device(self) -> torch.device:
        """Where this rank's parameters live: the current device of the mesh's type."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.mesh.device_type)
        return torch.device(self.mesh.device_type, module.current_device())

    def spec(self, shape: Sequence[int], dim: int, dtype: torch.dtype) -> DTensorSpec:
        """The DTensor spec of a contiguous parameter of global `shape` sharded along `dim`."""
        placements: tuple[Placement, ...] = (Shard(dim),)
        if self.replicate_axis is not None:
            placements = (Replicate(), Shard(dim))
        return make_spec(self.mesh, placements, shape, strides(shape), dtype)

    def smaller(self, size: int) -> "MeshRoles":
        """Roles on the mesh to which units reshard after forward: the shard axis cut into groups of `size` ranks.

        The ranks of one group hold a parameter once; the groups replicate it. The first call for a mesh and size makes
        process groups, so every rank of the mesh must make it in the same order.
        """
        known = _smaller_meshes.setdefault(self.mesh, {})
        if size not in known:
            known[size] = self._make_smaller(size)
        return MeshRoles(known[size], replicate_axis=0, shard_axis=1)

    def _make_smaller(self, size: int) -> DeviceMesh:
        groups = self.shard_size // size
        with torch.device("cpu"):
            ranks = self.mesh.mesh.movedim(self.shard_axis, -1)
            if self.replicate_axis is None:
                return DeviceMesh(self.mesh.device_type, ranks.view(groups, size), mesh_dim_names=("groups", "shard"))
            ranks = ranks.reshape(-1, groups, size)
            names = ("replicate", "groups", "shard")
            return DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=names)["groups", "shard"]


def roles_of(mesh: DeviceMesh) -> MeshRoles:
    """The roles of a 1-D or 2-D mesh's axes.

    Raises:
        ArgumentError: the mesh has another number of axes.
        MisuseError: a 2-D mesh has no axis names (a mistaken order of the axes could not be noticed).
    """
    if mesh.ndim not in (1, 2):
        raise ArgumentError(f"fully_shard: expected a 1-D (shard) or 2-D (replicate, shard) mesh, got {mesh}")
    if mesh.ndim == 1:
        return MeshRoles(mesh, replicate_axis=None, shard_axis=0)
    if mesh.mesh_dim_names is None:
        raise MisuseError(
            f"fully_shard: a 2-D mesh needs mesh_dim_names, the first for the replicate axis and the second for the "
            f"shard axis; got {mesh} without names. Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh."
        )
    return MeshRoles(mesh, replicate_axis=0, shard_axis=1)


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks; initialises the default process group from the environment if there is none."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # The mesh's own bookkeeping must be real also where the caller builds a model on the meta device.
    with torch.device("cpu"):
        return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
