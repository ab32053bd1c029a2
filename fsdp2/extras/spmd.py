"""`DataParallelMeshDims`: data-parallel axes of a full SPMD mesh, on which all parameters are DTensors. Layer: extras.

A sharded parameter is a DTensor on the same mesh, with several shard axes flattened into one. The unsharded parameter
is the original DTensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._torch import concatenate_meshes, flatten_mesh, strided_shard
from fsdp2.arguments import unfit
from fsdp2.errors import ArgumentError
from fsdp2.layout import dense_strides
from fsdp2.mesh import MeshRoles
from fsdp2.runtime import hooks
from fsdp2.specs import ParamSpecs, cuts_of


@dataclass(frozen=True)
class SpmdSpecs(ParamSpecs):
    """`data_axes` of `inner_mesh` are data parallel. A gradient may be `Partial` there, since the reduction sums."""

    data_axes: frozenset[int] = frozenset()

    def gradient_placements(self, grad: DTensor) -> tuple[Placement, ...]:
        return tuple(
            mine if axis in self.data_axes else wanted
            for axis, (mine, wanted) in enumerate(zip(grad.placements, self.inner_placements, strict=True))
        )


@dataclass(frozen=True)
class SpmdRoles(MeshRoles):
    """The data-parallel axes of `full_mesh`, with their names there."""

    full_mesh: DeviceMesh | None = None
    names_of_shard: tuple[str, ...] = ()
    names_of_replicas: tuple[str, ...] = ()

    def own_specs(self, fqn: str, param: torch.Tensor, dim: int) -> ParamSpecs:
        """Raises `ArgumentError` for a plain tensor, a DTensor on another mesh, or one that is sharded over a
        data-parallel axis."""
        return _on_full_mesh(fqn, param, dim, self)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full SPMD mesh are data parallel.

    Attributes:
        shard: name, or names, of the axes over which parameters are sharded.
        replicate: name, or names, of the axes over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("shard", self.shard), ("replicate", self.replicate)):
            names: Any = (value,) if isinstance(value, str) else () if value is None else value
            if not isinstance(names, (tuple, list)) or not all(isinstance(each, str) for each in names):
                raise ArgumentError(f"DataParallelMeshDims: {name}: expected names of axes or None, got {value!r}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard axes as a tuple, empty when there are none."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate axes as a tuple, empty when there are none."""
        return _as_names(self.replicate)

    def roles(self, mesh: DeviceMesh) -> SpmdRoles:
        """The roles of these axes. Several axes of one role are flattened into one. The first call creates a process
        group for them, so every rank of the mesh must make it.

        Raises:
            ArgumentError: no names were given, or `mesh` has no axis with that name.
        """
        shard, replicate = self.shard_names, self.replicate_names
        if not shard and not replicate:
            raise ArgumentError(
                "dp_mesh_dims: expected the names of shard axes, of replicate axes, or both; got neither"
            )
        if mesh.mesh_dim_names is None:
            raise ArgumentError(f"dp_mesh_dims: the mesh has no mesh_dim_names, so its axes cannot be named: {mesh}")
        both = set(shard) & set(replicate)
        if both:
            raise ArgumentError(f"dp_mesh_dims: an axis either shards or replicates, got both for {sorted(both)}")
        for name in (*shard, *replicate):
            if name not in mesh.mesh_dim_names:
                raise ArgumentError(f"dp_mesh_dims: no axis is named '{name}'; the mesh has {mesh.mesh_dim_names}")
        parts = [flatten_mesh(mesh[names]) for names in (replicate, shard) if names]
        return SpmdRoles(
            parts[0] if len(parts) == 1 else concatenate_meshes(parts),
            replicate_axis=0 if replicate else None,
            shard_axis=len(parts) - 1 if shard else None,
            full_mesh=mesh,
            names_of_shard=shard,
            names_of_replicas=replicate,
        )


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def _on_full_mesh(fqn: str, param: torch.Tensor, dim: int, roles: SpmdRoles) -> ParamSpecs:
    mesh = roles.full_mesh
    assert mesh is not None and mesh.mesh_dim_names is not None
    if not isinstance(param, DTensor):
        raise ArgumentError(
            f"'{fqn}' is a plain tensor; with dp_mesh_dims every parameter must be a DTensor on the full mesh {mesh} "
            "(see torch.distributed.tensor.distribute_module)"
        )
    if param.device_mesh is not mesh:
        raise ArgumentError(
            f"'{fqn}' is a DTensor on {param.device_mesh}, not on the mesh that was passed to fully_shard: {mesh}"
        )
    names = mesh.mesh_dim_names
    data_axes = [names.index(name) for name in (*roles.names_of_shard, *roles.names_of_replicas)]
    for axis in data_axes:
        if not param.placements[axis].is_replicate():
            raise ArgumentError(
                f"'{fqn}': expected Replicate() on the data-parallel axis '{names[axis]}', got placements "
                f"{param.placements}"
            )
    shard_axes = [names.index(name) for name in roles.names_of_shard] if roles.shard_axis is not None else []
    placements = list(param.placements)
    for axis in shard_axes:
        cuts = cuts_of(param.placements[axis + 1 :], mesh[tuple(names[axis + 1 :])], dim) if axis + 1 < mesh.ndim else 1
        placements[axis] = Shard(dim) if cuts == 1 else strided_shard(dim, split_factor=cuts)
    sharded_mesh, sharded_placements = mesh, placements
    if len(shard_axes) > 1:
        sharded_mesh, sharded_placements = _with_flat_axes(mesh, placements, roles, shard_axes[0])
    return SpmdSpecs(
        sharded_mesh,
        tuple(sharded_placements),
        tuple(param.shape),
        dense_strides(param.shape, param.stride()),
        mesh,
        param.placements,
        data_axes=frozenset(data_axes),
    )


def _with_flat_axes(
    mesh: DeviceMesh, placements: Sequence[Placement], roles: SpmdRoles, first_shard_axis: int
) -> tuple[DeviceMesh, list[Placement]]:
    """`mesh` with the axes of `roles` instead of the data-parallel axes, at the position of the first shard axis."""
    assert mesh.mesh_dim_names is not None and roles.shard_axis is not None
    parts: list[DeviceMesh] = []
    result: list[Placement] = []
    for axis, name in enumerate(mesh.mesh_dim_names):
        if axis == first_shard_axis:
            parts.append(roles.mesh)
            result += [Replicate()] * (roles.mesh.ndim - 1) + [placements[axis]]
        elif name not in roles.names_of_shard and name not in roles.names_of_replicas:
            parts.append(mesh[name])
            result.append(placements[axis])
    return concatenate_meshes(parts), result


def _check_dims(dims: Any) -> DataParallelMeshDims:
    """`dims` as ours; torch's own are accepted."""
    if isinstance(dims, DataParallelMeshDims):
        return dims
    if not {"shard", "replicate"} <= set(dir(dims)):
        hint = f"Pass DataParallelMeshDims(shard={dims!r})." if isinstance(dims, (str, tuple)) else ""
        raise unfit("dp_mesh_dims", "a DataParallelMeshDims or None", dims, hint)
    return DataParallelMeshDims(dims.shard, dims.replicate)


def _roles_of_info(info: Any) -> MeshRoles:
    """The roles in an `FSDPMeshInfo`, which holds the mesh in torch's `ShardPlacementResult`. Its class is private in
    torch; torchtitan passes such objects for experts."""
    if getattr(info, "dp_mesh_dims", None) is not None:
        return _check_dims(info.dp_mesh_dims).roles(info.spmd_mesh)
    return MeshRoles(info.mesh, replicate_axis=info.replicate_mesh_dim, shard_axis=info.shard_mesh_dim)


hooks.options["dp_mesh_dims"] = _check_dims
hooks.options["mesh_info"] = _roles_of_info
