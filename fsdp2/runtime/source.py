"""Where a group's unsharded values come from. Layer: runtime, below the bucket.

A `Shards` is the memory of the unsharded parameters, and fills it in each unshard::

                                          one storage, resized to 0 bytes between uses
    flat shards --copy in--> gather ====> | weight, all rows | pad | bias, all rows | pad |
                                            ^ `param.whole` and `param.unsharded` are views of it

================  ==================================================================================================
`Shards`          gathers the shards
`HostShards`      offloaded shards: copied to the device first
`Replicated`      nothing is sharded: only copies
================  ==================================================================================================

`source_of` chooses one at the first unshard, and after a conversion. Features add kinds and wrappers (`Around`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp2.layout import pack
from fsdp2.mesh import Axis
from fsdp2.runtime import hooks
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.state import Stays
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage, ReleasedMemory

Group: TypeAlias = Any  # `runtime.bucket.Bucket`: that module is above this one


class Source:
    """Fills the unsharded parameters of a group, and releases their memory.

    Attributes:
        follows_compute: compute may still use the memory that `start` writes to.
        keeps: the reshards in which it keeps part of the values.
    """

    follows_compute: bool = False
    keeps: tuple[Stays, ...] = ()

    @property
    def base(self) -> "Shards | None":
        """The memory to fill; None before the first `start`."""
        return None

    def start(self, group: Group) -> Callable[[], None]:
        """Called on the all-gather stream: start filling the parameters. Returns a function that completes them; call
        it on the same stream."""
        raise NotImplementedError

    def release(self, group: Group, memory: ReleasedMemory, stays: Stays) -> None:
        """The group reshards, and the last use of the memory has been enqueued on the compute stream."""
        raise NotImplementedError

    def keep_part(self, group: Group) -> list[nn.Parameter | None] | None:
        """Called before `release`: keep part of the values for the next `start`. Returns what the modules hold until
        then; None for the sharded parameters."""

    def arrived(self, group: Group) -> None:
        """The parameters are complete, so kept parts are no longer needed."""

    def drop_part(self, group: Group) -> None:
        """Drop kept parts, because the shards may change. Called on the all-gather stream, when the modules hold the
        sharded parameters again."""

    def forget_plans(self) -> None:
        """The channel has a new `Comm`."""

    def forget(self, memory: ReleasedMemory) -> None:
        """Drop kept values, because the shards are about to change."""


class Unchosen(Source):
    """A placeholder; the first unshard chooses a source."""

    def start(self, group: Group) -> Callable[[], None]:
        group.source = wrapped(source_of(group), group)
        return group.source.start(group)  # type: ignore[no-any-return]


class Around(Source):
    """A source that adds something to `inner`."""

    def __init__(self, inner: Source):
        self.inner = inner
        self.keeps = self.keeps or inner.keeps

    @property
    def follows_compute(self) -> bool:  # type: ignore[override]
        return self.inner.follows_compute

    @property
    def base(self) -> "Shards":
        assert self.inner.base is not None
        return self.inner.base

    def start(self, group: Group) -> Callable[[], None]:
        return self.inner.start(group)

    def release(self, group: Group, memory: ReleasedMemory, stays: Stays) -> None:
        self.inner.release(group, memory, stays)

    def keep_part(self, group: Group) -> list[nn.Parameter | None] | None:
        return self.inner.keep_part(group)

    def arrived(self, group: Group) -> None:
        self.inner.arrived(group)

    def drop_part(self, group: Group) -> None:
        self.inner.drop_part(group)

    def forget_plans(self) -> None:
        self.inner.forget_plans()

    def forget(self, memory: ReleasedMemory) -> None:
        self.inner.forget(memory)


class Shards(FlatStorage, Source):
    """One block of memory, the unsharded parameters as views of it, and the gather into them.

    Attributes:
        gather: planned at the first `start`.
    """

    def __init__(self, group: Group):
        self.gather: Gather | None = None
        params: Sequence[ManagedParameter] = group.params
        lies_here = [not param.aliases and param.extension is None for param in params]
        sizes = [
            param.layout.numel * param.compute_dtype.itemsize if is_here else 0
            for param, is_here in zip(params, lies_here, strict=True)
        ]
        offsets, total = pack(sizes, ALIGN_BYTES)
        super().__init__(total, group.roles.device)
        with torch.inference_mode(False), torch.no_grad():
            FlatStorage.alloc(self)
            for param, offset in zip(params, offsets, strict=True):
                # Two views with separate version counters: to autograd, filling `whole` must not look like a change of
                # the parameter.
                shape, dtype = param.layout.shape, param.compute_dtype
                if param.aliases:
                    param.whole, view = param.flat.view(shape), param.flat.data.view(shape)
                elif param.extension is None:
                    param.whole, view = self.view(offset, shape, dtype), self.view(offset, shape, dtype)
                else:
                    continue
                param.make_unsharded(param.geometry.from_memory(view))
            FlatStorage.free(self)

    @property
    def base(self) -> "Shards":
        return self

    def start(self, group: Group) -> Callable[[], None]:
        return (self.gather or self._plan(group)).start(group.seen.flats, True, self)

    def _plan(self, group: Group) -> Gather:
        self.gather = gather_over(group.roles.shard, group)
        return self.gather

    def forget_plans(self) -> None:
        self.gather = None

    def release(self, group: Group, memory: ReleasedMemory, stays: Stays) -> None:
        memory.release(self, group.channel.fqn)


def gather_over(axis: Axis, group: Group) -> Gather:
    """The gather of the parameters over `axis`."""
    params: Sequence[ManagedParameter] = group.params
    storage: Shards = group.source.base
    is_taken = storage.is_taken
    with torch.inference_mode(False), torch.no_grad():
        storage.alloc()
        fulls = [param.whole for param in params if param.whole is not None]
        gather = Gather([param.layout.over(axis.size) for param in params], fulls, axis, group.channel)
        if not is_taken:
            storage.free()
    return gather


class HostShards(Shards):
    """Offloaded shards."""

    def start(self, group: Group) -> Callable[[], None]:
        return (self.gather or self._plan(group)).start(on_device(group), False, self)


def on_device(group: Group) -> Sequence[torch.Tensor]:
    """The flat shards; if offloaded, copies on the device, which the current stream owns. They are cast later: a copy
    that also casts would cast on the CPU and block it."""
    flats: Sequence[torch.Tensor] = group.seen.flats
    if group.params[0].plan.home == group.roles.device:
        return flats
    return [flat.to(group.roles.device, non_blocking=True) for flat in flats]


class Replicated(Shards):
    """Nothing is sharded. Parameters that need no cast and no move use the memory of the shards directly."""

    def start(self, group: Group) -> Callable[[], None]:
        self.alloc()
        return partial(_copy, group.params, on_device(group))


def _copy(params: Sequence[ManagedParameter], shards: Sequence[torch.Tensor]) -> None:
    for param, shard in zip(params, shards, strict=True):
        if not param.aliases:
            assert param.whole is not None
            param.whole.view(-1).copy_(shard, non_blocking=True)


def source_of(group: Group) -> Shards:
    """A new source for a group."""
    for make in hooks.sources:
        if (found := make(group)) is not None:
            source: Shards = found
            return source
    if group.roles.shard_group is None:
        return Replicated(group)
    return Shards(group) if group.params[0].plan.home == group.roles.device else HostShards(group)


def wrapped(source: Source, group: Group) -> Source:
    """`source.base` with the wrappers that features add now; `source` itself before its first start."""
    if source.base is None:
        return source
    found: Source = source.base
    for wrap in hooks.around_sources:
        found = wrap(found, group)
    if group.keep:
        found = hooks.implementation(hooks.keeps, group.keep, "keeping unsharded parameters")(found)
    return found
