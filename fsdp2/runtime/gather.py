"""`Gather`: how a group's shards become its unsharded parameters. Layer: runtime, below the bucket.

Everything that no step changes is computed once: each parameter's lane, the views for a rank's own shards, the operands
of the collective, and the copies out of the packed buffer. The copy into those views casts to the compute dtype. It is
the only copy of the direct lane::

    direct   shard --copy--> own rows of the parameter ==collective==> all rows
    packed   shard --copy--> own segment of the buffer ==collective==> all segments --copy--> parameter
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fsdp2._torch import copy_lists
from fsdp2.comm.base import Collective, Operand, wrapped
from fsdp2.layout import Lane, ShardLayout, pack
from fsdp2.mesh import Axis
from fsdp2.runtime import hooks
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.packing import interleave
from fsdp2.runtime.storage import FlatStorage

_Copies = tuple[list[torch.Tensor], list[torch.Tensor]]


class Gather:
    """The all-gather of several tensors over one axis of a mesh. Create it outside of inference mode, while `fulls`
    have storage.

    Args:
        layouts: how each tensor is split over `axis.size` ranks.
        fulls: the tensors to fill, of the layouts' shapes: not the parameters, but other tensors on the same memory, so
            that autograd does not see a modification.
    """

    def __init__(self, layouts: Sequence[ShardLayout], fulls: Sequence[torch.Tensor], axis: Axis, channel: Channel):
        self.operands: list[Operand] = []
        self._axis = axis
        self._channel = channel
        self._comm = comm = channel.comm_over(axis)
        self._packed: torch.UntypedStorage | None = None
        self._packed_nbytes = 0
        self._unpack_to: list[torch.Tensor] = []
        self._unpack_from: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = [torch.empty(0)] * len(layouts)
        packed: list[int] = []
        for index, (layout, full) in enumerate(zip(layouts, fulls, strict=True)):
            if comm.gather_lane(layout, full.itemsize) is Lane.PACKED:
                packed.append(index)
            elif layout.parts == 1:
                self._own[index] = full.view(-1)
            else:
                self.operands.append(Operand(full.view(-1), layout.flat_bounds))
                self._own[index] = self.operands[-1].row(axis.rank)
        self._is_packed = len(packed) == len(layouts)
        if packed:
            self._make_packed(packed, layouts, fulls)
        dtypes = [full.dtype for full in fulls]
        # One call per dtype: a call with several dtypes wrote garbage on CUDA until
        # https://github.com/pytorch/pytorch/pull/173531.
        self._by_dtype = [[i for i, dtype in enumerate(dtypes) if dtype == each] for each in dict.fromkeys(dtypes)]
        self._known: tuple[Sequence[torch.Tensor], list[_Copies]] | None = None  # the last shards, and their copies
        numel = axis.size * sum(layout.padded_numel for layout in layouts)
        nbytes = sum(operand.full.nbytes for operand in self.operands)
        self._travels = numel, nbytes, dtypes[0] if len(self._by_dtype) == 1 else None
        self._collective: Collective | None = None

    def _make_packed(self, indices: list[int], layouts: Sequence[ShardLayout], fulls: Sequence[torch.Tensor]) -> None:
        """One buffer ``[ranks, segment]`` of bytes; a segment holds one rank's shard of each parameter, end to end."""
        size, rank = self._axis.size, self._axis.rank
        itemsizes = {fulls[index].itemsize for index in indices}
        sizes_bytes = [layouts[index].padded_numel * fulls[index].itemsize for index in indices]
        offsets, segment = pack(sizes_bytes, align=max(itemsizes))
        segment = -(-segment // max(itemsizes)) * max(itemsizes)
        self._packed_nbytes = size * segment
        storage = FlatStorage(self._packed_nbytes, fulls[0].device)
        storage.alloc()
        views = {
            dtype: storage.view(0, (size, segment // dtype.itemsize), dtype)
            for dtype in {fulls[index].dtype for index in indices}
        }
        for index, offset in zip(indices, offsets, strict=True):
            layout, full = layouts[index], fulls[index]
            columns = views[full.dtype]  # slices of one view per dtype; each is contiguous
            start = offset // full.itemsize
            self._own[index] = columns[rank, start : start + layout.local_numel(rank)]
            for source, destination in interleave(columns, start, full, layout):
                self._unpack_from.append(source)
                self._unpack_to.append(destination)
        if segment:
            dtypes = {fulls[index].dtype for index in indices}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
            numel = segment // dtype.itemsize
            whole = storage.view(0, (size * numel,), dtype)
            self.operands.append(Operand(whole, range(0, (size + 1) * numel, numel)))
        self._packed = next(iter(views.values())).untyped_storage()

    def start(self, shards: Sequence[torch.Tensor], stay: bool, storage: FlatStorage) -> Callable[[], None]:
        """Copy this rank's flat `shards` in and issue the collective. Returns a function that waits for it and copies
        out of the packed buffer; call it on the same stream.

        Args:
            stay: later calls pass the same list with the same shards.
            storage: the memory of the tensors to fill. If all are packed, it is allocated after the collective,
                otherwise before.
        """
        if not self._is_packed:
            storage.alloc()
        if self._packed is not None and not self._packed.nbytes():
            self._packed.resize_(self._packed_nbytes)
        known = self._known
        for destinations, sources in known[1] if known is not None and known[0] is shards else self._plan(shards, stay):
            copy_lists(destinations, sources)
        if not self.operands:
            return partial(self._finish, storage, None, None)
        collective = self._collective
        if collective is None or collective.info.fqn is not self._channel.fqn:  # the unit's FQN has changed
            info = self._channel.info("all_gather", self._axis.group, *self._travels)
            collective = self._collective = wrapped(self._comm.plan_all_gather(self.operands, info))
        return partial(self._finish, storage, collective, collective.start())

    def _plan(self, shards: Sequence[torch.Tensor], stay: bool) -> list[_Copies]:
        """The copies in, one list for each dtype."""
        pairs = [([self._own[at] for at in indices], [shards[at] for at in indices]) for indices in self._by_dtype]
        copies = [merge(*each) for each in pairs for merge in hooks.copies] or pairs
        if stay:
            self._known = shards, copies
        return copies

    def _finish(self, storage: FlatStorage, collective: Collective | None, started: Any) -> None:
        if collective is not None:
            collective.wait(started)
        if self._packed is not None:
            if self._is_packed:
                storage.alloc()
            if self._unpack_to:  # not if every parameter is empty
                copy_lists(self._unpack_to, self._unpack_from)
            self._packed.resize_(0)
