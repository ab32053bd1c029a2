"""`SmallerShards`: `reshard_after_forward=<int>`, which keeps more than this rank's rows until backward. Layer: extras.

For 8 ranks and groups of 2, with the rows of a parameter that rank 5 holds::

    sharded     [. . . . . 5 . .]
    resharded   [. . . . 4-7    ]     between forward and backward: its rows on the smaller mesh
    unsharded   [0-7            ]     gathered from 8 ranks for forward, from 2 for backward
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fsdp2._torch import make_parameter
from fsdp2.mesh import MeshRoles
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Around, Source, gather_over
from fsdp2.specs import ParamSpecs


class SmallerShards(Around):
    """Copies of this rank's rows on the smaller mesh `roles`, in the compute dtype. The compute stream owns them; the
    all-gather stream reads them before compute waits for it."""

    keeps_part = True

    def __init__(self, inner: Source, roles: MeshRoles):
        super().__init__(inner)
        self._roles = roles
        self._gather: Gather | None = None
        self._copies: list[torch.Tensor] = []

    def start(self, group: Bucket) -> Callable[[], None]:
        if not self._copies:
            return self.inner.start(group)
        if self._gather is None:
            self._gather = gather_over(self._roles.shard, group)
        return self._gather.start(self._copies, False, self.base)

    def keep_part(self, group: Bucket) -> list[nn.Parameter | None]:
        with torch.no_grad():
            self._copies = [_copied(param, self._roles) for param in group.params]
        return [param.resharded for param in group.params]

    def drop_part(self, group: Bucket) -> None:
        """The modules hold other forms. Those that the user froze meanwhile stay so."""
        if self._copies:
            self._copies = []
            group.gradients.follow([param.resharded for param in group.params])
            for param in group.params:
                param.resharded = None

    arrived = drop_part

    def forget_plans(self) -> None:
        self._gather = None
        self.inner.forget_plans()


def _copied(param: ManagedParameter, roles: MeshRoles) -> torch.Tensor:
    """This rank's rows on the smaller mesh, copied from `unsharded`; 1-D. Sets `resharded`, a DTensor on them (for
    model-parallel parameters the sharded one, because no mesh has both the smaller and the model-parallel axes)."""
    assert param.whole is not None
    layout, rank, specs = param.layout.over(roles.shard_size), roles.shard_rank, param.plan.specs
    chunk = param.whole.narrow(layout.dim, layout.bounds[rank], layout.local_size(rank))
    local, param.resharded = chunk.clone(memory_format=torch.contiguous_format), param.sharded
    if specs.inner_mesh is None:
        smaller = ParamSpecs(roles.mesh, (Replicate(), Shard(param.plan.dim)), specs.shape, specs.stride)
        form = param.geometry.from_memory(local)
        param.resharded = make_parameter(form, smaller.sharded(local.dtype), param.sharded.requires_grad)
    return local.view(-1)


def _over_smaller(source: Source, group: Bucket) -> Source:
    return source if group.smaller is None else SmallerShards(source, group.smaller)


hooks.around_sources.append(_over_smaller)
