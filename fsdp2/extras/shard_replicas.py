"""Shards that are split over the replicas too: `ZeroPolicy(shard_replicas=True)`. Layer: extras.

The shards are split again, over the replicate axis. For 2 replicas of 2 ranks, and the 8 rows of a parameter::

    sharded          0 1 | 4 5      2 3 | 6 7       replica 0, rank 0 | 1      replica 1, rank 0 | 1
    inner shards     0 1 2 3 | 4 5 6 7              the same in both; gathered over the replicas once a step
    unsharded        0 1 2 3 4 5 6 7                gathered from these as often as needed

A gradient goes the same way in reverse: a reduce-scatter over the replicas replaces the all-reduce.
"""

from collections.abc import Callable
from typing import Any

import torch

from fsdp2.comm.base import wrapped
from fsdp2.layout import pack
from fsdp2.runtime import hooks
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.packing import Packing
from fsdp2.runtime.reduction import ReductionPlan, Tensors, Wait
from fsdp2.runtime.source import Group, Shards, on_device
from fsdp2.runtime.state import Stays
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage
from fsdp2.runtime.streams import Streams


class ReplicaShards(Shards):
    """The padded inner shards, in the compute dtype, are gathered over the replicate axis once, and kept until the
    shards may change. The all-gather stream owns their memory."""

    keeps = Stays.PART, Stays.SMALLER

    def __init__(self, group: Group):
        super().__init__(group)
        params, roles = group.params, group.roles
        offsets, total = pack([p.layout.padded_numel * p.compute_dtype.itemsize for p in params], ALIGN_BYTES)
        self._inner = FlatStorage(total, roles.device)
        self._at: list[int] | None = None  # the versions of the shards that were gathered
        with torch.inference_mode(False), torch.no_grad():
            self._inner.alloc()
            shapes = [param.layout.local_shape(roles.shard_rank) for param in params]
            fulls = [
                self._inner.view(offset, shape, param.compute_dtype)
                for param, offset, shape in zip(params, offsets, shapes, strict=True)
            ]
            self._flats = [full.view(-1) for full in fulls]
            layouts = [param.geometry.outer for param in params if param.geometry.outer is not None]
            self._over_replicas = Gather(layouts, fulls, roles.replicate, group.channel)
            self._inner.free()

    def start(self, group: Group) -> Callable[[], None]:
        if self._at != group.seen.versions:
            self._inner.alloc()
            self._over_replicas.start(on_device(group), False, self._inner)()
            self._at = group.seen.versions
        return (self.gather or self._plan(group)).start(self._flats, True, self)

    def drop_part(self, group: Group) -> None:
        self._at = None
        self._inner.free()


class _Plan(ReductionPlan):
    """Each replica gets its piece of this rank's shard, instead of the all-reduced shard."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        layouts = [param.geometry.outer for param in self.params]
        self._inner = Packing([layout for layout in layouts if layout is not None])

    def over_replicas(
        self, flat: torch.Tensor, average: bool, streams: Streams, kept: Tensors
    ) -> tuple[torch.Tensor, Wait | None]:
        # The buffers were allocated on the reduce-scatter stream or here, and are read here.
        inner = self._inner
        pairs = zip(inner.layouts, flat.split(self.sizes), strict=True)
        kept += [flat, inner.pack([output[: layout.numel].view(layout.shape) for layout, output in pairs])]
        piece = torch.empty(inner.segment, dtype=self.dtype, device=flat.device)
        if not inner.segment:
            return piece, None
        collective = self._planned.get(("replicas", average))
        if collective is None:
            group = self.channel.roles.replicate.group
            bounds = range(0, group.size() * inner.segment + 1, inner.segment)
            info = self.info("reduce_scatter", group, inner.segment)
            collective = wrapped(self.channel.base.plan_reduce_scatter([bounds], info, average))
            self._planned["replicas", average] = collective
        return piece, streams.later(collective.wait, collective.start([kept[-1].view(-1)], [piece]))


def _source_of(group: Group) -> Shards | None:
    return ReplicaShards(group) if group.roles.sharded_replicas else None


def _plan_reductions(unit: Any) -> None:
    for group in unit.groups:
        if group.roles.sharded_replicas:
            group.gradients.make_plan = _Plan


hooks.sources.append(_source_of)
hooks.unit_made.append(_plan_reductions)
