"""`InnerShards`: with sharded replicas, the shards of the shard axis, gathered over the replicate axis. Layer: runtime,
below the unsharded storage.

They are gathered once and stay until the parameters change.
"""

from collections.abc import Sequence

import torch

from fsdp2.layout import pack
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage


class InnerShards:
    """The inner shards of a group: padded pieces of the shard axis, in the compute dtype. All memory is owned by the
    all-gather stream.

    Attributes:
        flats: 1-D, one for each parameter; filled between `gather` and `free`.
    """

    def __init__(self, params: Sequence[ManagedParameter], channel: Channel):
        rank = channel.roles.shard_rank
        offsets, total = pack([p.layout.padded_numel * p.compute_dtype.itemsize for p in params], ALIGN_BYTES)
        self._storage = FlatStorage(total, channel.roles.device)
        self._storage.alloc()
        self._at: list[int] | None = None  # the versions of the shards that were gathered
        self.flats: list[torch.Tensor] = []
        fulls = []
        for param, offset in zip(params, offsets, strict=True):
            fulls.append(self._storage.view(offset, param.layout.local_shape(rank), param.compute_dtype))
            self.flats.append(fulls[-1].view(-1))
        layouts = [param.geometry.outer for param in params if param.geometry.outer is not None]
        self._gather = Gather(layouts, fulls, channel.roles.replicate, channel)
        self._storage.free()

    def gather(self, shards: Sequence[torch.Tensor], versions: list[int]) -> None:
        """Fill them from the flat `shards`, which have these `versions`, unless they are up to date."""
        if self._at == versions:
            return
        self._storage.alloc()
        self._gather.start(shards)()
        self._at = versions

    def free(self) -> None:
        """Free the inner shards, because the shards will change or have changed. The next unshard gathers them."""
        self._at = None
        self._storage.free()
