"""The roles of the axes of a DeviceMesh: the shard axis, the replicate axis, their groups. Layer: mesh.

=====================  ===========================  ==========================================
mesh                   axes                         this is
=====================  ===========================  ==========================================
1-D                    shard                        FSDP
2-D                    replicate, shard (in order)  HSDP
replicate axes alone   replicate                    DDP-like: whole parameters, one all-reduce
=====================  ===========================  ==========================================
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2._torch import flatten_mesh, real_tensors
from fsdp2.errors import ArgumentError, MisuseError


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: the dim to shard, and a separate mesh for the parameter.

    Attributes:
        placement: ``Shard(dim)``.
        mesh: 1-D or 2-D, as the `mesh` argument of `fully_shard`; None for the mesh passed there.
    """

    placement: Shard
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis of a mesh, including this rank. A missing axis has no group, and size 1."""

    group: Any = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class MeshRoles:
    """A mesh with the roles of its axes, of which at least one exists. Equal for equal meshes.

    Attributes:
        mesh: the data-parallel axes alone.
        sharded_replicas: sharded parameters are split over the replicate axis too (those gathered in forward are not).
        own_specs: replaces `specs_of`: makes a parameter's specs from its FQN, the parameter and the dim.
        flat: without a shard axis, the 1-D mesh of all ranks of `mesh`, over which gradients are reduced.
        shard: the ranks that together hold a parameter once; also as `shard_size`, `shard_rank` and `shard_group`.
        replicate: the ranks that hold the same shard as this one; also as `replicate_size` and `replicate_group`.
    """

    mesh: DeviceMesh
    replicate_axis: int | None
    shard_axis: int | None
    sharded_replicas: bool = False
    flat: DeviceMesh | None = None
    shard: Axis = field(init=False, compare=False, repr=False)
    shard_size: int = field(init=False, compare=False, repr=False)
    shard_rank: int = field(init=False, compare=False, repr=False)
    shard_group: dist.ProcessGroup | None = field(init=False, compare=False, repr=False)
    replicate: Axis = field(init=False, compare=False, repr=False)
    replicate_size: int = field(init=False, compare=False, repr=False)
    replicate_group: dist.ProcessGroup | None = field(init=False, compare=False, repr=False)
    own_specs: ClassVar[Any] = None

    def __post_init__(self) -> None:
        shard = _axis_of(self.mesh, self.shard_axis)
        replicate = _axis_of(self.mesh, self.replicate_axis) if self.flat is None else _axis_of(self.flat, 0)
        vars(self).update(shard=shard, shard_size=shard.size, shard_rank=shard.rank, shard_group=shard.group)
        vars(self).update(replicate=replicate, replicate_size=replicate.size, replicate_group=replicate.group)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the shard axis; without one, that of the replicate axis."""
        if self.mesh.ndim == 1:
            return self.mesh
        assert self.mesh.mesh_dim_names is not None and self.shard_axis is not None
        return self.mesh[self.mesh.mesh_dim_names[self.shard_axis]]

    @cached_property
    def device(self) -> torch.device:
        """Where this rank's parameters live: the current device of the mesh's type."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.mesh.device_type)
        return torch.device(self.mesh.device_type, module.current_device())

    def replicated(self) -> "MeshRoles":
        """The same ranks, each holding whole parameters: for scalars, and for ZeRO stage 0."""
        if self.shard_axis is None:
            return self
        flat = flatten_mesh(self.mesh)
        return replace(self, replicate_axis=0, shard_axis=None, sharded_replicas=False, flat=flat)


def _axis_of(mesh: DeviceMesh, axis: int | None) -> Axis:
    return Axis() if axis is None else Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))


def roles_of(mesh: DeviceMesh) -> MeshRoles:
    """The roles of the axes of a 1-D or 2-D mesh. Raises `ArgumentError` for another number of axes, and `MisuseError`
    for a 2-D mesh without names, since swapped axes would go unnoticed."""
    if mesh.ndim not in (1, 2):
        raise ArgumentError(
            f"fully_shard: expected a 1-D (shard) or 2-D (replicate, shard) mesh, got {mesh}. With model-parallel axes "
            "in one mesh, pass the data-parallel part (mesh['dp']) or name its axes with dp_mesh_dims."
        )
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
    with real_tensors():
        return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
