"""`Channel`: the process groups and the `Comm` that a bucket communicates with. Layer: runtime."""

import torch
import torch.distributed as dist

from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, OpInfo
from fsdp2.mesh import Axis, MeshRoles
from fsdp2.runtime import hooks


class Channel:
    """How a bucket communicates. Setters that change it call `Bucket.channel_changed` afterwards.

    Attributes:
        fqn: the unit's FQN, relative to the root once there is one.
        roles: mesh and axes.
        base: the backend's `Comm`.
        comm: `base`, or a feature's wrapper around it.
        scatter_group: the process group of the shard axis that reduce-scatters use; None without a shard axis.
    """

    def __init__(self, roles: MeshRoles, wire: torch.dtype | None):
        self.fqn = ""
        self.roles = roles
        group = roles.shard_group or roles.replicate_group
        assert group is not None
        self.base: Comm = comm_for(group, roles.device)
        self.comm = self.base
        if wire is not None:
            self.comm = hooks.implementation(hooks.scatter_dtypes, wire, "reduce_scatter_dtype")(self.base)
        self.scatter_group: dist.ProcessGroup | None = roles.shard_group

    def comm_over(self, axis: Axis) -> Comm:
        """The `Comm` for `axis`; for the replicate axis always `base`."""
        return self.base if axis.group is self.roles.replicate_group else self.comm

    def info(
        self, kind: str, group: dist.ProcessGroup, numel: int = 0, nbytes: int = 0, dtype: torch.dtype | None = None
    ) -> OpInfo:
        """The description of a collective of this unit over `group`."""
        return OpInfo(kind, self.fqn, numel, nbytes, dtype, group, self.roles.device)
