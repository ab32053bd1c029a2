"""Meshes that work but are probably not intended. Layer: checks, above api."""

from collections.abc import Sequence
from warnings import warn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch import real_tensors
from fsdp2.api import Draft
from fsdp2.errors import UnsupportedError


def check_meshes(drafts: Sequence[Draft]) -> None:
    """Check the meshes of all parameters that `fully_shard` will shard.

    Raises:
        UnsupportedError: a shard axis has its ranks in another order than its process group.
    """
    for roles in {plan.roles for draft in drafts for _, plan in draft.planned}:
        if roles.shard_axis is not None:
            _check_order(roles.mesh, roles.shard_axis)
        if roles.sharded_replicas and roles.replicate_axis is not None:
            _check_order(roles.mesh, roles.replicate_axis)
        names = roles.mesh.mesh_dim_names
        if roles.own_specs is None and names is not None and len(names) == 2 and roles.flat is None:
            first, second = names
            if "shard" in first and "replic" in second:
                warn(
                    f"fully_shard: the axes of a 2-D mesh are taken by position: parameters are replicated over "
                    f"'{first}' and sharded over '{second}' here. Pass mesh['{second}', '{first}'], or dp_mesh_dims.",
                    stacklevel=3,
                )


def _check_order(mesh: DeviceMesh, axis: int) -> None:
    """Collectives order shards by rank in the group, which torch sorts; DTensors order them by position in the mesh. If
    these differ, a model trains, but its checkpoints and initial values have rows in another order. All ranks raise."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    with real_tensors():
        own: list[int] = mesh.mesh[tuple(slice(None) if i == axis else at for i, at in enumerate(coordinate))].tolist()
        is_sorted = bool((mesh.mesh.diff(dim=axis) > 0).all())
    members = dist.get_process_group_ranks(mesh.get_group(axis))
    if own != members or (own == sorted(own) and not is_sorted):
        raise UnsupportedError(
            f"fully_shard: expected ascending ranks along a shard axis, as in its process group, {members}; on rank "
            f"{dist.get_rank()} the mesh has {own}. Make the mesh with ascending ranks."
        )
