"""`Channel`: the process groups and the `Comm` through which a group's parameters are communicated. Layer: runtime."""

import torch
import torch.distributed as dist

from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, What
from fsdp2.comm.custom import AllGather, CustomComm, ReduceScatter
from fsdp2.comm.groups import separate_group
from fsdp2.mesh import Axis, MeshRoles


class Channel:
    """How a param group communicates; the `set_custom_*` methods and similar ones change it.

    Attributes:
        fqn: the unit's FQN, relative to the root once there is one.
        roles: mesh and axes.
        base: the backend's `Comm`.
        comm: `base`, or the user's collectives around it.
        scatter_group: the process group of the shard axis that reduce-scatters use; None without a shard axis.
    """

    def __init__(self, roles: MeshRoles):
        self.fqn = ""
        self.roles = roles
        self.base: Comm = comm_for(roles.any_group, roles.device)
        self.comm = self.base
        self.scatter_group: dist.ProcessGroup | None = roles.shard_group
        self._custom: tuple[AllGather | None, ReduceScatter | None] = (None, None)
        self._memory: tuple[AllGather | None, ReduceScatter | None] = (None, None)

    def comm_over(self, axis: Axis) -> Comm:
        """The `Comm` for `axis`; for the replicate axis always the backend's own."""
        return self.base if axis.group is self.roles.replicate_group else self.comm

    def what(
        self, kind: str, group: dist.ProcessGroup, numel: int = 0, nbytes: int = 0, dtype: torch.dtype | None = None
    ) -> What:
        """A collective of this unit over `group`."""
        return What(kind, self.fqn, numel, nbytes, dtype, group, self.roles.device)

    def like(self, other: "Channel") -> None:
        """Copy the settings of `other`, a channel of the same roles."""
        self.scatter_group, self._custom, self._memory = other.scatter_group, other._custom, other._memory
        self.base = other.base
        self._choose()

    @property
    def has_custom(self) -> bool:
        """Whether custom collectives are set."""
        return self._custom != (None, None)

    def customise(self, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None) -> None:
        """Use these collectives instead of the current ones; None leaves one unchanged."""
        self._custom = (all_gather or self._custom[0], reduce_scatter or self._custom[1])
        self._choose()

    def use_memory(self, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None) -> None:
        """Use these collectives (the backend's, in other memory) where the user has set none; None for both removes
        them."""
        self._memory = (all_gather, reduce_scatter)
        self._choose()

    def _choose(self) -> None:
        all_gather = self._custom[0] or self._memory[0]
        reduce_scatter = self._custom[1] or self._memory[1]
        is_base = all_gather is None and reduce_scatter is None
        self.comm = self.base if is_base else CustomComm(self.base, all_gather, reduce_scatter)

    def separate_reduce_scatter(self, enable: bool) -> None:
        """Give reduce-scatters their own process group, or let them share that of the all-gathers again. Creating the
        group is collective."""
        group = self.roles.shard_group
        self.scatter_group = separate_group(group) if enable and group is not None else group
