"""`Source`: what a group's all-gather sends. Chosen once, when its unsharded parameters are created. Layer: runtime,
below the unsharded storage.

================  ==================================================================================================
`Shards`          the shards
`HostShards`      offloaded shards, copied to the device
`ReplicaShards`   with sharded replicas: the *inner* shards, gathered over the replicate axis until the shards change
================  ==================================================================================================
"""

from collections.abc import Sequence

import torch

from fsdp2.layout import pack
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage

Sent = tuple[Sequence[torch.Tensor], bool]


class Shards:
    """The shards as they are."""

    def take(self, shards: Sequence[torch.Tensor], versions: list[int]) -> Sent:
        """The flat tensors to send, one for each parameter; and whether they stay the same while the list does.
        Called on the all-gather stream with the flat shards, which have these `versions`."""
        return shards, True

    def free(self) -> None:
        """The shards will change or have changed. Called on the all-gather stream."""


class HostShards(Shards):
    """Offloaded shards, copied to `device` first and cast there: a copy that does both would cast on the CPU and block
    it. The copies are owned by the all-gather stream, and so is everything that reads them."""

    def __init__(self, params: Sequence[ManagedParameter], device: torch.device):
        self._params = params
        self._device = device

    def take(self, shards: Sequence[torch.Tensor], versions: list[int]) -> Sent:
        pairs = zip(self._params, shards, strict=True)
        copies = [shard if each.is_extended else shard.to(self._device, non_blocking=True) for each, shard in pairs]
        return copies, False


class ReplicaShards(Shards):
    """The padded pieces of the shard axis, in the compute dtype, gathered over the replicate axis once, until the
    parameters change. The all-gather stream owns their memory."""

    def __init__(self, params: Sequence[ManagedParameter], channel: Channel, shards: Shards):
        self._shards = shards
        rank = channel.roles.shard_rank
        offsets, total = pack([p.layout.padded_numel * p.compute_dtype.itemsize for p in params], ALIGN_BYTES)
        self._storage = FlatStorage(total, channel.roles.device)
        self._at: list[int] | None = None  # the versions of the shards that were gathered
        self._flats: list[torch.Tensor] = []
        fulls = []
        with torch.inference_mode(False), torch.no_grad():
            self._storage.alloc()
            for param, offset in zip(params, offsets, strict=True):
                fulls.append(self._storage.view(offset, param.layout.local_shape(rank), param.compute_dtype))
                self._flats.append(fulls[-1].view(-1))
            layouts = [param.geometry.outer for param in params if param.geometry.outer is not None]
            self._gather = Gather(layouts, fulls, channel.roles.replicate, channel)
            self._storage.free()

    def take(self, shards: Sequence[torch.Tensor], versions: list[int]) -> Sent:
        if self._at != versions:
            self._storage.alloc()
            self._gather.start(self._shards.take(shards, versions)[0])()
            self._at = versions
        return self._flats, True

    def free(self) -> None:
        self._at = None
        self._storage.free()


def source_of(params: Sequence[ManagedParameter], channel: Channel) -> Shards:
    """The source of a group of these parameters."""
    device = channel.roles.device
    shards = Shards() if params[0].plan.home == device else HostShards(params, device)
    return ReplicaShards(params, channel, shards) if channel.roles.sharded_replicas else shards
