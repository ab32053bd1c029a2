"""The DTensor form of a managed parameter, sharded and unsharded: mesh, placements, global shape. Layer: mesh.

==================  ===================================  =====================================================
the parameter was   unsharded it is                      sharded it is a DTensor on
==================  ===================================  =====================================================
a plain tensor      a plain tensor                       the data-parallel mesh
a DTensor on a      that DTensor                         the data-parallel axes, then the model-parallel ones
model-parallel mesh                                      (both submeshes of one mesh)
==================  ===================================  =====================================================

If a model-parallel axis splits the dim that we shard, it splits first, and we split its pieces. `_StridedShard`
expresses this, so that `full_tensor()` puts the pieces together in the right order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._torch import DTensorSpec, concatenate_meshes, make_spec, same_root_mesh, strided_shard
from fsdp2.errors import ArgumentError
from fsdp2.layout import dense_strides
from fsdp2.mesh import MeshRoles


@dataclass(frozen=True)
class ParamSpecs:
    """The DTensor side of one parameter.

    Attributes:
        mesh, placements: those of the sharded parameter and its gradient.
        shape, stride: the global ones.
        inner_mesh, inner_placements: those of the unsharded parameter; None for a plain tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner_mesh: DeviceMesh | None = None
    inner_placements: tuple[Placement, ...] = ()

    def sharded(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the sharded parameter, or of its gradient, in `dtype`."""
        return self._spec(self.mesh, self.placements, dtype)

    def unsharded(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the unsharded parameter, which must be a DTensor."""
        assert self.inner_mesh is not None
        return self._spec(self.inner_mesh, self.inner_placements, dtype)

    def _spec(self, mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype) -> DTensorSpec:
        placements = _placements.setdefault(tuple((type(each), each) for each in placements), tuple(placements))
        # An entry lives as long as its spec, which keeps the mesh alive, so ids are not reused.
        key = id(mesh), id(placements), self.shape, self.stride, dtype
        found = _specs.get(key)
        return found or _specs.setdefault(key, make_spec(mesh, placements, self.shape, self.stride, dtype))

    def gradient_placements(self, _grad: DTensor) -> tuple[Placement, ...]:
        """The placements that an unsharded gradient must have before its local tensor is reduced."""
        return self.inner_placements


# Equal specs on one mesh are one object, and so are equal placements: code that handles many parameters compares
# identities first.
_specs: WeakValueDictionary[Any, DTensorSpec] = WeakValueDictionary()
_placements: dict[Any, tuple[Placement, ...]] = {}


def specs_of(fqn: str, param: torch.Tensor, dim: int, roles: MeshRoles) -> ParamSpecs:
    """The specs of `param`, to be sharded along `dim` on the axes of `roles`. Raises `ArgumentError` for a DTensor on
    another device type, or on a mesh that does not go with `roles`."""
    shape, stride = tuple(param.shape), dense_strides(param.shape, param.stride())
    if roles.own_specs is not None:
        own: ParamSpecs = roles.own_specs(fqn, param, dim)
        return own
    if not isinstance(param, DTensor):
        return ParamSpecs(roles.mesh, _data_placements(roles, dim, 1), shape, stride)
    inner = param.device_mesh
    if inner.device_type != roles.mesh.device_type or not same_root_mesh(roles.mesh, inner):
        raise ArgumentError(
            f"'{fqn}' is a DTensor on {inner}, which is not part of the same mesh as that given to fully_shard, "
            f"{roles.mesh}. Make one mesh with all axes, e.g. init_device_mesh(device, (dp, tp), "
            'mesh_dim_names=("dp", "tp")), and pass mesh["dp"] and mesh["tp"].'
        )
    placements = _data_placements(roles, dim, cuts_of(param.placements, inner, dim))
    joint = concatenate_meshes([roles.mesh, inner])
    return ParamSpecs(joint, (*placements, *param.placements), shape, stride, inner, param.placements)


def _data_placements(roles: MeshRoles, dim: int, cuts: int) -> tuple[Placement, ...]:
    """The placements on the axes of `roles`, for a dim that is already split into `cuts` pieces."""
    placements: list[Placement] = [Replicate()] * roles.mesh.ndim
    if roles.shard_axis is not None:
        placements[roles.shard_axis] = Shard(dim) if cuts == 1 else strided_shard(dim, split_factor=cuts)
    if roles.sharded_replicas:
        assert roles.replicate_axis is not None
        placements[roles.replicate_axis] = strided_shard(dim, split_factor=cuts * roles.shard_size)
    return tuple(placements)


def cuts_of(placements: Sequence[Placement], mesh: DeviceMesh, dim: int) -> int:
    """The number of pieces into which `placements` split `dim`. (`_StridedShard` is not always a `Shard` in torch.)"""
    return prod(
        mesh.size(axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and not placement.is_partial() and getattr(placement, "dim", None) == dim
    )
