"""`UnshardedStorage`: the unsharded parameters of a group, created at its first unshard. Layer: runtime, below the
param group.

It owns the memory of the unsharded parameters and the gathers that fill it: from the shards, and from the copies on a
smaller mesh. With sharded replicas, shards are first gathered over the replicate axis into the *inner* shards, which
stay until the parameters change::

    shards --gather over the replicate axis--> inner shards --gather over the shard axis--> unsharded parameters
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from fsdp2._torch import local_tensor, set_local_tensor
from fsdp2.layout import Lane, pack
from fsdp2.mesh import Axis
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.extended import ExtendedGather
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.host_copy import HostCopy
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.shard_memory import FlatShard
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage, Storage, Storages


class ReplicaShards:
    """The padded pieces of the shard axis, in the compute dtype, gathered over the replicate axis once, until the
    parameters change; `flats` has one 1-D tensor for each parameter. The all-gather stream owns their memory."""

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
        """Free them, because the shards will change or have changed."""
        self._at = None
        self._storage.free()


class UnshardedStorage:
    """The unsharded parameters of a group. Creating it allocates its memory, which the all-gather stream owns.

    Attributes:
        storage: the memory of the unsharded parameters. Starting a gather allocates it, except for parameters that are
            copied out of a packed buffer, whose memory is allocated when the gather is finished.
        copies: this rank's rows on the smaller mesh, flat, while the parameters are resharded to it.
    """

    def __init__(self, params: Sequence[ManagedParameter], channel: Channel):
        self._params = params
        self._channel = channel
        self._gathers: dict[tuple[int, bool], Gather] = {}
        self._extended: dict[ManagedParameter, ExtendedGather] = {}
        self.copies: list[torch.Tensor] = []
        self._inner: ReplicaShards | None = None
        with torch.inference_mode(False), torch.no_grad():
            is_late = {param: self._travels_packed(param) for param in params if not param.is_extended}
            self._early = self._make_flat([param for param, late in is_late.items() if not late])
            self._late = self._make_flat([param for param, late in is_late.items() if late])
            self._late_indices = {index for index, param in enumerate(params) if is_late.get(param)}
            self._extended = {param: ExtendedGather(param) for param in params if param.is_extended}
            self.storage: Storage = Storages([self._early, self._late, *self._extended.values()])
            if params[0].geometry.outer is not None:
                self._inner = ReplicaShards(params, channel)
            self._late.free()

    def _travels_packed(self, param: ManagedParameter) -> bool:
        lane = self._channel.comm.gather_lane(param.layout, param.compute_dtype.itemsize)
        return lane is Lane.PACKED and not param.aliases

    def _make_flat(self, params: Sequence[ManagedParameter]) -> FlatStorage:
        """One block of memory for several parameters without an extension, and the parameters as views of it."""
        sizes = [0 if param.aliases else param.layout.numel * param.compute_dtype.itemsize for param in params]
        offsets, total = pack(sizes, ALIGN_BYTES)
        storage = FlatStorage(total, self._channel.roles.device)
        storage.alloc()
        for param, offset in zip(params, offsets, strict=True):
            # Two views with separate version counters: filling `whole` must not look to autograd like a change of the
            # parameter.
            shape, dtype = param.layout.shape, param.compute_dtype
            if param.aliases:
                param.make_unsharded(_alias(param))
                continue
            param.whole = storage.view(offset, shape, dtype)
            param.make_unsharded(param.geometry.from_memory(storage.view(offset, shape, dtype)))
        return storage

    # --- one unshard -------------------------------------------------------------------------------------------------

    def start(
        self, shards: Sequence[torch.Tensor], blocks: Sequence[FlatShard], versions: list[int]
    ) -> Callable[[], None]:
        """Issue the all-gather from the flat `shards`, which stand in `blocks` and have these `versions`. Returns a
        function that completes the unsharded parameters."""
        device = self._channel.roles.device
        known: Sequence[FlatShard] | None = None if self._extended else blocks
        if self._params[0].plan.home != device:
            known = None
            # Offloaded shards are copied to the device first and cast there. A copy that does both would cast on the
            # CPU and block it. The copies are owned by this stream, and so is everything that reads them.
            pairs = zip(self._params, shards, strict=True)
            shards = [shard if each.is_extended else shard.to(device, non_blocking=True) for each, shard in pairs]
        if self._inner is not None:
            self._inner.gather(shards, versions)
            shards, known = self._inner.flats, ()
        if self._channel.roles.shard_group is None:
            self.storage.alloc()
            self._copy(shards)
            return _nothing
        gather = self._gather_over(self._channel.roles.shard)
        self._take(gather)
        return partial(self._finish, gather.start(self._sources(shards), known), self._extended.values())

    def _take(self, gather: Gather) -> None:
        """Allocate the memory that `gather` needs when it starts."""
        self._early.alloc()
        for extended in self._extended.values():
            extended.alloc()
        if not self._can_wait(gather):
            self._late.alloc()

    def _can_wait(self, gather: Gather) -> bool:
        """Whether all memory that is allocated late belongs to parameters that are packed in `gather`: a `Comm` that
        was changed since, or another number of ranks, may pack others."""
        return not self._extended and self._late_indices <= gather.packed

    def _copy(self, shards: Sequence[torch.Tensor]) -> None:
        """Copy the shards; without a shard axis nothing is communicated."""
        for param, shard in zip(self._params, shards, strict=True):
            assert param.whole is not None
            if not param.aliases:
                param.whole.view(-1).copy_(shard, non_blocking=True)

    def start_smaller(self, axis: Axis) -> Callable[[], None]:
        """Issue the all-gather from `copies`, over the smaller mesh's shard `axis`; returns as `start` does."""
        for extended in self._extended.values():
            extended.take_inner()
        gather = self._gather_over(axis, plain=True)
        self._take(gather)
        for extended in self._extended.values():
            extended.take_inner()  # again, to free the rest of what `_take` allocated
        return partial(self._finish, gather.start(self.copies), ())

    def start_from(self, kept: HostCopy) -> Callable[[], None]:
        """Copy instead of gathering; returns as `start` does."""
        return partial(self._copy_from, kept)

    def _copy_from(self, kept: HostCopy) -> None:
        self._early.alloc()
        self._late.alloc()
        for extended in self._extended.values():
            extended.take_inner()
        kept.copy_to(self._params)

    def _finish(self, finish_gather: Callable[[], None], extended: Iterable[ExtendedGather]) -> None:
        self._late.alloc()
        finish_gather()
        if extended:
            with torch.inference_mode(False), torch.no_grad():
                for each in extended:
                    each.finish()

    def free_inner(self) -> None:
        """The shards will change or have changed."""
        if self._inner is not None:
            self._inner.free()

    def _sources(self, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._extended:
            return shards
        sources = []
        for param, shard in zip(self._params, shards, strict=True):
            extended = self._extended.get(param)
            sources += [shard] if extended is None else [each.view(-1) for each in extended.sources()]
        return sources

    def _gather_over(self, axis: Axis, plain: bool = False) -> Gather:
        """The gather over `axis`; with `plain`, from copies of the unsharded parameters, without extensions."""
        key = axis.size, plain
        if key not in self._gathers:
            layouts, fulls = [], []
            for param in self._params:
                extended = None if plain else self._extended.get(param)
                if extended is not None:
                    layouts += extended.layouts
                    # Separate version counters, because tensors that `post` made may be views of them.
                    fulls += [full.data for full in extended.fulls]
                else:
                    assert param.whole is not None
                    layouts.append(param.layout.over(axis.size))
                    fulls.append(param.whole)
            with torch.inference_mode(False), torch.no_grad():
                stays = self._late.is_taken  # memory that is kept at the same address
                self.storage.alloc()
                self._gathers[key] = Gather(layouts, fulls, axis, self._channel)
                if not stays and self._can_wait(self._gathers[key]):
                    self._late.free()
        return self._gathers[key]

    # --- staying valid -----------------------------------------------------------------------------------------------

    def take_back(self) -> str | None:
        """Put unsharded parameters back into their memory: a module that is no unit was converted by itself, which has
        given them other memory, that no gather fills. Returns the FQN of a trainable one of these. (Of frozen ones some
        modules change the dtype in each forward.)"""
        found = None
        with torch.inference_mode(False), torch.no_grad():
            for param in self._params:
                unsharded, whole = param.unsharded, param.whole
                if unsharded is None or whole is None or param in self._extended:
                    continue
                local = unsharded if param.plan.specs.inner_mesh is None else local_tensor(unsharded)
                if local.untyped_storage() is not whole.untyped_storage():
                    _set_data(param, param.geometry.from_memory(whole.data))
                    found = found or (param.fqn if unsharded.requires_grad else None)
        return found

    def forget_gathers(self) -> None:
        """Drop the gathers, because the channel changed."""
        self._gathers = {}


def _nothing() -> None:
    """Complete an unshard that needs no completion."""


def _set_data(param: ManagedParameter, data: torch.Tensor) -> None:
    """Let the unsharded parameter be `data`, as the same object: a graph may hold it."""
    assert param.unsharded is not None
    if param.plan.specs.inner_mesh is not None:
        set_local_tensor(param.unsharded, data, param.plan.specs.unsharded(data.dtype))
    else:
        param.unsharded.data = data


def _alias(param: ManagedParameter) -> torch.Tensor:
    """The data of an unsharded parameter that shares the shard's memory. Sets `whole`."""
    shape = param.layout.shape
    param.whole = param.flat.view(shape)
    return param.geometry.from_memory(param.flat.data.view(shape))
