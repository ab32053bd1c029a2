"""`UnshardedStorage`: the unsharded parameters of a group, created at its first unshard. Layer: runtime, below the
param group.

It owns the memory of the unsharded parameters, and the gathers that fill it: from what its source gives, and from the
copies on a smaller mesh::

    shards --source--> flat tensors on the device --gather over the shard axis--> unsharded parameters
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp2._torch import local_tensor, set_local_tensor
from fsdp2.layout import pack
from fsdp2.mesh import Axis
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.extended import ExtendedGather
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.host_copy import HostCopy
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import source_of
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage, Storage


class UnshardedStorage:
    """The unsharded parameters of a group. A `Storage`: their memory, and what gather hooks need, which the all-gather
    stream owns.

    Attributes:
        source: what a gather sends.
        gathers: by the size of the axis, and whether they are of `copies`; to be cleared when the channel changes.
        copies: this rank's rows on the smaller mesh, flat, while the parameters are resharded to it.
    """

    def __init__(self, params: Sequence[ManagedParameter], channel: Channel):
        self._params = params
        self._channel = channel
        self.gathers: dict[tuple[int, bool], Gather] = {}
        self.copies: list[torch.Tensor] = []
        self.source = source_of(params, channel)
        with torch.inference_mode(False), torch.no_grad():
            self._flat = self._make_flat([param for param in params if not param.is_extended])
            self._extended = {param: ExtendedGather(param) for param in params if param.is_extended}
            self._parts: list[Storage] = [self._flat, *self._extended.values()]
            self._flat.free()

    def _make_flat(self, params: Sequence[ManagedParameter]) -> FlatStorage:
        """One block of memory for the parameters without an extension, and the parameters as views of it."""
        sizes = [0 if param.aliases else param.layout.numel * param.compute_dtype.itemsize for param in params]
        offsets, total = pack(sizes, ALIGN_BYTES)
        storage = FlatStorage(total, self._channel.roles.device)
        storage.alloc()
        for param, offset in zip(params, offsets, strict=True):
            # Two views with separate version counters: filling `whole` must not look to autograd like a change of the
            # parameter.
            shape, dtype = param.layout.shape, param.compute_dtype
            if param.aliases:
                param.whole = param.flat.view(shape)
                param.make_unsharded(param.geometry.from_memory(param.flat.data.view(shape)))
                continue
            param.whole = storage.view(offset, shape, dtype)
            param.make_unsharded(param.geometry.from_memory(storage.view(offset, shape, dtype)))
        return storage

    def alloc(self) -> None:
        """Allocate all memory."""
        for each in self._parts:
            each.alloc()

    def free(self) -> None:
        """Free all memory; the next gather allocates it."""
        for each in self._parts:
            each.free()

    # --- one unshard -------------------------------------------------------------------------------------------------

    def start(self, shards: Sequence[torch.Tensor], versions: list[int]) -> Callable[[], None]:
        """Issue the all-gather from the flat `shards`, which have these `versions`. Returns a function that completes
        the unsharded parameters."""
        sent, stay = self.source.take(shards, versions)
        if self._channel.roles.shard_group is None:
            self.alloc()
            return partial(self._copy, sent)
        gather = self.gathers.get((self._channel.roles.shard_size, False)) or self._plan(self._channel.roles.shard)
        if self._extended:
            self.alloc()
            return partial(self._finish_extended, gather.start(self._call_hooks(sent)))
        if not gather.is_packed:
            self._flat.alloc()
        return partial(self._finish, gather.start(sent, stay))

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
        gather = self.gathers.get((axis.size, True)) or self._plan(axis, plain=True)
        if not gather.is_packed:
            self._flat.alloc()
        return partial(self._finish, gather.start(self.copies))

    def copy_from(self, kept: HostCopy) -> None:
        """Copy instead of gathering."""
        self._flat.alloc()
        for extended in self._extended.values():
            extended.take_inner()
        kept.copy_to(self._params)

    def _finish(self, finish_gather: Callable[[], None]) -> None:
        self._flat.alloc()  # what is copied out of the packed buffer has no memory before
        finish_gather()

    def _finish_extended(self, finish_gather: Callable[[], None]) -> None:
        finish_gather()
        with torch.inference_mode(False), torch.no_grad():
            for each in self._extended.values():
                each.finish()

    def _call_hooks(self, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sources = []
        for param, shard in zip(self._params, shards, strict=True):
            extended = self._extended.get(param)
            sources += [shard] if extended is None else [each.view(-1) for each in extended.sources()]
        return sources

    def _plan(self, axis: Axis, plain: bool = False) -> Gather:
        """The gather over `axis`; with `plain`, from copies of the unsharded parameters, without extensions."""
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
            stays = self._flat.is_taken  # memory that is kept at the same address
            (self._flat if plain else self).alloc()
            gather = self.gathers[axis.size, plain] = Gather(layouts, fulls, axis, self._channel)
            if not stays:
                self._flat.free()
        return gather

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
                    data = param.geometry.from_memory(whole.data)
                    if param.plan.specs.inner_mesh is not None:
                        set_local_tensor(unsharded, data, param.plan.specs.unsharded(data.dtype))
                    else:
                        unsharded.data = data
                    found = found or (param.fqn if unsharded.requires_grad else None)
        return found
