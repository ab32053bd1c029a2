"""`SmallerShards`: `reshard_after_forward=<int>`, which keeps the rows of a smaller mesh until backward. Layer: extras.

For 8 ranks and groups of 2, with the rows of a parameter that rank 5 holds::

    sharded     [. . . . . 5 . .]
    resharded   [. . . . 4-7    ]     between forward and backward: its rows on the smaller mesh
    unsharded   [0-7            ]     gathered from 8 ranks for forward, from 2 for backward
"""

from collections.abc import Callable, Sequence
from typing import Any
from warnings import warn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fsdp2._torch import make_parameter, real_tensors, version
from fsdp2._torch.extras import new_group_of
from fsdp2.api import Draft
from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.mesh import MeshRoles
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Around, Source, gather_over
from fsdp2.runtime.state import Stays
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.specs import ParamSpecs


class SmallerShards(Around):
    """Copies of this rank's rows on the smaller mesh `roles`, in the compute dtype. The compute stream owns them; it
    waits for the all-gather stream, which reads them."""

    keeps = (Stays.SMALLER,)

    def __init__(self, inner: Source, roles: MeshRoles):
        super().__init__(inner)
        self._roles = roles
        self._gather: Gather | None = None
        self._copies: list[torch.Tensor] = []

    def start(self, group: Bucket) -> Callable[[], None]:
        if group.phase is not Phase.PART or not self._copies:  # also after a gather that failed
            return self.inner.start(group)
        if self._gather is None:
            self._gather = gather_over(self._roles.shard, group)
        return self._gather.start(self._copies, False, self.base)

    def keep_part(self, group: Bucket) -> list[nn.Parameter | None]:
        with torch.no_grad():
            self._copies = [_copied(param, self._roles) for param in group.params]
        return [param.resharded for param in group.params]

    def drop_part(self, group: Bucket) -> None:
        """Raises `OrderError` if the copies, which the modules held, were changed."""
        self.arrived(group)
        self.inner.drop_part(group)

    def arrived(self, group: Bucket) -> None:
        """The modules are about to hold other forms; keep what the user froze or unfroze meanwhile."""
        if self._copies:
            self._copies = []
            group.gradients.follow([param.resharded for param in group.params])
            changed = [param.fqn for param in group.params if _is_changed(param)]
            for param in group.params:
                param.resharded = None
            if changed:
                raise OrderError(
                    f"'{changed[0]}' was changed between forward and backward, while resharded to a smaller mesh, so "
                    "no shard has the change. Change parameters between backward and the next forward, or after "
                    "reshard() of the module that holds it."
                )

    def forget(self, memory: ReleasedMemory) -> None:
        self._copies = []
        self.inner.forget(memory)

    def forget_plans(self) -> None:
        self._gather = None
        self.inner.forget_plans()


def _is_changed(param: ManagedParameter) -> bool:
    form = param.resharded
    return form is not None and form is not param.sharded and version(form) > 0


def _copied(param: ManagedParameter, roles: MeshRoles) -> torch.Tensor:
    """Copy this rank's rows on the smaller mesh from `unsharded`; 1-D. Sets `resharded` to a DTensor on them (for
    model-parallel parameters to `sharded`, because no mesh has both the smaller and the model-parallel axes)."""
    assert param.whole is not None
    layout, rank, specs = param.layout.over(roles.shard_size), roles.shard_rank, param.plan.specs
    chunk = param.whole.narrow(layout.dim, layout.bounds[rank], layout.local_size(rank))
    local, param.resharded = chunk.clone(memory_format=torch.contiguous_format), param.sharded
    if specs.inner_mesh is None:
        smaller = ParamSpecs(roles.mesh, (Replicate(), Shard(param.plan.dim)), specs.shape, specs.stride)
        form = param.geometry.from_memory(local)
        param.resharded = make_parameter(form, smaller.sharded(local.dtype), param.sharded.requires_grad)
    return local.view(-1)


# The meshes, by the default process group (after `destroy_process_group` an equal mesh has other groups), the mesh that
# they were created from, and the size. All units of that mesh share their groups.
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[DeviceMesh, int], DeviceMesh]] = WeakKeyDictionary()


def smaller(roles: MeshRoles, size: int) -> MeshRoles:
    """Roles on the mesh to which units reshard after forward: the shard axis split into groups of `size` ranks that
    together hold a parameter once. The first call for a mesh and size creates process groups, so every rank of the mesh
    must make these calls in the same order."""
    world = dist.group.WORLD
    assert world is not None
    known, key = _meshes.setdefault(world, {}), (roles.mesh, size)
    if key not in known:
        with real_tensors():
            ranks = roles.shard_mesh.mesh.view(-1, size)
            group, place = divmod(roles.shard_rank, size)
            # `DeviceMesh` would make all groups of a mesh, and name them by a counter. If this mesh is part of a larger
            # one, other ranks make other meshes, and groups of different ranks would have the same name.
            backend = dist.get_backend_config(roles.shard.group)
            own = ranks[:, place].tolist(), ranks[group].tolist()
            groups = [new_group_of(each, backend, "smaller") for each in own]
            names = ("groups", "shard")
            known[key] = DeviceMesh.from_group(groups, roles.mesh.device_type, mesh=ranks, mesh_dim_names=names)
    return MeshRoles(known[key], replicate_axis=0, shard_axis=1)


def _check(chosen: tuple[Any, MeshRoles]) -> bool | int:
    """The checked int for `reshard_after_forward`, or the equivalent bool if there is one."""
    value, roles = chosen
    if not isinstance(value, int):
        raise ArgumentError(f"reshard_after_forward: expected a bool, an int or None, got {value!r}")
    if value < 1 or roles.shard_size % value != 0:
        error = ArgumentError if roles.own_specs is None else UnsupportedError  # torch has no such mesh there
        size = f"the shard axis' size {roles.shard_size} of {roles.mesh}"
        raise error(f"reshard_after_forward: expected a divisor of {size}, got {value}")
    if value == 1:
        warn("reshard_after_forward=1 keeps parameters unsharded, as False does; pass False", stacklevel=3)
        return False
    return True if value == roles.shard_size else value


def _plan(drafts: Sequence[Draft]) -> None:
    """Make the smaller meshes. The size must fit the mesh of each parameter."""
    for draft in drafts:
        size = draft.placing.reshard_to
        for roles in dict.fromkeys(plan.roles for _, plan in draft.planned):
            if size is not None and not isinstance(size, bool) and roles.shard_axis is not None:
                _check((size, roles))
                draft.smaller[roles] = smaller(roles, size)


def _over_smaller(source: Source, group: Bucket) -> Source:
    return source if group.smaller is None else SmallerShards(source, group.smaller)


hooks.options["reshard_after_forward"] = _check
hooks.units_drafted.append(_plan)
hooks.around_sources.append(_over_smaller)
