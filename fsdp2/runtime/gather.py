"""`Gather`: how a group's shards become its unsharded parameters. Layer: runtime, below the param group.

Everything that does not change from step to step is computed once: the lane of each parameter, the views into which a
rank copies its own shards (casting to the compute dtype: the only copy of the direct lane), the operands of the
collective, and the copies out of the packed buffer::

    direct   shard --copy--> own rows of the parameter ==collective==> all rows
    packed   shard --copy--> own segment of the buffer ==collective==> all segments --copy--> parameter
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp2._torch import foreach_copy
from fsdp2.comm.base import Operand, Pending
from fsdp2.comm.scratch import all_gather_like
from fsdp2.events import emit
from fsdp2.layout import Lane, ShardLayout, pack
from fsdp2.mesh import Axis
from fsdp2.runtime.channel import Channel, wait_for
from fsdp2.runtime.packing import interleave
from fsdp2.runtime.shard_memory import FlatShard
from fsdp2.runtime.storage import FlatStorage
from fsdp2.watch.exchange import Arrival, Exchange

_Copies = tuple[list[torch.Tensor], list[torch.Tensor]]


class Gather:
    """The all-gather of several tensors over one axis of a mesh. To be created outside of inference mode, while `fulls`
    have storage.

    Args:
        layouts: how each tensor is split over `axis.size` ranks.
        fulls: the tensors to fill, of the layouts' shapes: not the parameters but other tensors on the same memory, so
            that autograd does not see filling as a modification.

    Attributes:
        is_packed: all tensors are copied out of the packed buffer, and so need memory only once the collective has
            finished.
    """

    def __init__(self, layouts: Sequence[ShardLayout], fulls: Sequence[torch.Tensor], axis: Axis, channel: Channel):
        self.operands: list[Operand] = []
        self._axis = axis
        self._channel = channel
        self._comm = comm = channel.comm_over(axis)
        self._packed: FlatStorage | None = None
        self._unpack_to: list[torch.Tensor] = []
        self._unpack_from: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = [torch.empty(0)] * len(layouts)
        # Where packed tensors start and end in a segment, in elements.
        self._starts: dict[int, tuple[torch.dtype, int]] = {}
        self._ends: dict[int, tuple[torch.dtype, int]] = {}
        packed: list[int] = []
        for index, (layout, full) in enumerate(zip(layouts, fulls, strict=True)):
            if comm.gather_lane(layout, full.itemsize) is Lane.PACKED:
                packed.append(index)
            elif layout.parts == 1:
                self._own[index] = full.view(-1)
            else:
                self.operands.append(Operand(full.view(-1), layout.flat_bounds))
                self._own[index] = self.operands[-1].row(axis.rank)
        self.is_packed = len(packed) == len(layouts)
        if packed:
            self._make_packed(packed, layouts, fulls)
        dtypes = [full.dtype for full in fulls]
        # One call per dtype: a call with several dtypes wrote garbage on CUDA until
        # https://github.com/pytorch/pytorch/pull/173531.
        self._by_dtype = [[i for i, dtype in enumerate(dtypes) if dtype == each] for each in dict.fromkeys(dtypes)]
        self._known: tuple[Sequence[FlatShard], list[_Copies]] | None = None
        numel = axis.size * sum(layout.padded_numel for layout in layouts)
        nbytes = sum(operand.full.nbytes for operand in self.operands)
        self._travels = numel, nbytes, dtypes[0] if len(self._by_dtype) == 1 else None
        self._exchange = Exchange("all-gather", channel.fqn, axis.group, *self._travels, fulls[0].device)
        self._mark()

    def _mark(self) -> None:
        """What travels says what it is."""
        for operand in self.operands:
            operand.mark = self._exchange.mark
        self._exchange.begin_like = all_gather_like(self._comm, self.operands, self._axis.group)

    def _make_packed(self, indices: list[int], layouts: Sequence[ShardLayout], fulls: Sequence[torch.Tensor]) -> None:
        """One buffer ``[ranks, segment]`` of bytes; a segment holds one rank's shard of each parameter, end to end."""
        size, rank = self._axis.size, self._axis.rank
        itemsizes = {fulls[index].itemsize for index in indices}
        sizes_bytes = [layouts[index].padded_numel * fulls[index].itemsize for index in indices]
        offsets, segment = pack(sizes_bytes, align=max(itemsizes))
        segment = -(-segment // max(itemsizes)) * max(itemsizes)
        self._packed = FlatStorage(size * segment, fulls[0].device)
        self._packed.alloc()
        views = {
            dtype: self._packed.view(0, (size, segment // dtype.itemsize), dtype)
            for dtype in {fulls[index].dtype for index in indices}
        }
        for index, offset in zip(indices, offsets, strict=True):
            layout, full = layouts[index], fulls[index]
            columns = views[full.dtype]  # one view for all tensors of a dtype, whose parts are contiguous
            start = offset // full.itemsize
            self._own[index] = columns[rank, start : start + layout.local_numel(rank)]
            self._starts[index], self._ends[index] = (full.dtype, start), (full.dtype, start + layout.padded_numel)
            for source, destination in interleave(columns, start, full, layout):
                self._unpack_from.append(source)
                self._unpack_to.append(destination)
        if segment:
            dtypes = {fulls[index].dtype for index in indices}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
            numel = segment // dtype.itemsize
            whole = self._packed.view(0, (size * numel,), dtype)
            self.operands.append(Operand(whole, range(0, (size + 1) * numel, numel)))

    def start(self, shards: Sequence[torch.Tensor], blocks: Sequence[FlatShard] | None = None) -> Callable[[], None]:
        """Copy this rank's flat `shards` in and issue the collective. Returns a function that waits for it and copies
        out of the packed buffer; call it on the same stream.

        Args:
            blocks: which of the shards stand together. The same list means the same shards as in the last call; None,
                other ones each time.
        """
        if self._packed is not None:
            self._packed.alloc()
        for destinations, sources in self._copies(shards, blocks):
            foreach_copy(destinations, sources)
        pending: Pending | None = None
        if self.operands:
            fqn = self._channel.fqn
            if fqn is not self._exchange.fqn:
                self._exchange.rename(fqn)
                self._mark()
            emit("all_gather", fqn, *self._travels, self._axis.size)
            with self._exchange:
                pending = Arrival(self._exchange, self._comm.all_gather(self.operands, self._axis.group))
        return partial(self._finish, pending)

    def _copies(self, shards: Sequence[torch.Tensor], blocks: Sequence[FlatShard] | None) -> list[_Copies]:
        """The copies in, one list for each dtype."""
        current = [block for block in blocks or () if block.is_current()]
        if blocks is not None and self._known is not None and current == self._known[0]:
            return self._known[1]
        pairs = dict(enumerate(zip(self._own, shards, strict=True)))
        for block in current:
            self._join(block, pairs)
        chosen = [[pairs[index] for index in indices if index in pairs] for indices in self._by_dtype]
        copies = [([into for into, _ in each], [of for _, of in each]) for each in chosen]
        if blocks is not None:
            self._known = current, copies
        return copies

    def _join(self, block: FlatShard, pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Make one copy of those of shards that stand together, here and in the packed buffer."""
        runs: list[list[int]] = []
        for index in block.starts:
            if runs and index in self._starts and self._starts[index] == self._ends.get(runs[-1][-1]):
                runs[-1].append(index)
            else:
                runs.append([index])
        for first, *others in runs:
            if others:
                numel = self._ends[others[-1]][1] - self._starts[first][1]
                start = block.starts[first]
                pairs[first] = pairs[first][0].as_strided((numel,), (1,)), block.tensor[start : start + numel]
                for index in others:
                    del pairs[index]

    def _finish(self, pending: Pending | None) -> None:
        if pending is not None:
            wait_for(pending, "all_gather", self._channel.fqn)
        if self._packed is not None:
            foreach_copy(self._unpack_to, self._unpack_from)
            self._packed.free()
