"""`GlooComm`: point-to-point messages straight into the destination's rows. Layer: comm.

gloo's own all-gather and reduce-scatter stage their data and take up to twice as long (its reduce-scatter is slower
than its all-reduce), see docs/decisions/gloo.md. Here each rank sends its range to every other rank and receives theirs
in place; in a reduce-scatter it receives the others' data for its range and sums in rank order, so that the result does
not depend on the order of arrival.

A message's tag says of which unit and operation it is. So ranks that run units in a different order do not receive
each other's weights: what they wait for does not come, which the watchdog reports. Several messages may be in flight at
once; those of one tag are issued in the same order on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.comm.base import Bounds, Collective, Comm, Operand, Pending, PlannedGather, PlannedReduction, Tensors, What
from fsdp2.comm.wire import sum_rows

_WHOLE_BYTES = 64 * 1024  # of an all-reduce: below, the second round of messages costs more than the bytes

Message = tuple[Callable[[list[torch.Tensor], int, int], dist.Work], list[torch.Tensor], int, int]


class ScratchPool:
    """Reusable receive buffers: a fresh large CPU tensor causes page faults that cost about as much as the copy into
    it.

    A buffer belongs to its user until it is returned; the pool keeps the few largest.
    """

    def __init__(self, max_kept: int = 4):
        self.free: list[torch.Tensor] = []
        self.max_kept = max_kept

    def take(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of at least `nbytes`: the smallest free one that is large enough, otherwise a new one."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        fitting = [index for index, buffer in enumerate(self.free) if buffer.numel() >= nbytes]
        if not fitting:
            return torch.empty(nbytes, dtype=torch.uint8)
        return self.free.pop(min(fitting, key=lambda index: self.free[index].numel()))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next caller use `buffer`."""
        if buffer.numel():
            self.free.append(buffer)
        self.free.sort(key=torch.Tensor.numel)
        del self.free[: -self.max_kept]


def _calls(group: dist.ProcessGroup, received: Sequence[Tensors], sent: Sequence[Tensors], tag: int) -> list[Message]:
    """What this rank exchanges with all others, as calls: for each operand it receives ``received[operand][rank]`` from
    that rank, and sends ``sent[operand][rank]`` to it."""
    rank, size, tag = group.rank(), group.size(), tag & 0x3FFFFFFF | 0x40000000
    calls: list[Message] = []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        for into, rows in zip(received, sent, strict=True):
            if into[source].numel():
                calls.append((group.recv, [into[source]], source, tag))
            if rows[to].numel():
                calls.append((group.send, [rows[to]], to, tag))
    return calls


# gloo cannot withdraw a message. If a receive is freed before its message arrives, all later messages between the two
# ranks are blocked, whatever their tag: the next barrier hangs (torch 2.13). So the handles of messages that nobody
# will wait for, because of an exception, are kept until the group is used again. Then all ranks have sent theirs.
_unwaited: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()


def keep_unwaited(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    """Keep the handles of messages that are freed without a wait."""
    _unwaited.setdefault(group, []).extend(works)


def finish_unwaited(group: dist.ProcessGroup) -> None:
    """Wait for the kept handles and free them. Messages of one kind arrive in order, so new ones come after these."""
    if _unwaited:
        for work in _unwaited.pop(group, ()):
            work.wait()


class Messages:
    """Messages in flight, and what follows when all have arrived."""

    def __init__(self, group: dist.ProcessGroup, calls: Sequence[Message], finish: Callable[[], None] | None = None):
        self.works: list[dist.Work] = []
        self.group = group
        self.finish = finish
        self.is_waited_for = not calls
        finish_unwaited(group)
        for call, tensors, peer, tag in calls:
            self.works.append(call(tensors, peer, tag))

    def wait(self) -> None:
        """See `Pending`."""
        self.is_waited_for = True
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()

    def __del__(self) -> None:
        if not self.is_waited_for:
            keep_unwaited(self.works, self.group)


class SumInRankOrder:
    """A reduce-scatter, whose rows are summed when all have arrived; called to start it.

    The first row is received directly in the output if it has the output's dtype, so two ranks need no other memory."""

    def __init__(self, pool: ScratchPool, bounds: list[Bounds], what: What, is_narrow: bool):
        self._pool = pool
        self._group = what.group
        self._tag = what.tag
        self._rank, self._size = what.group.rank(), what.group.size()
        self._sizes = [_sizes(each) for each in bounds]
        self._in_place = not is_narrow
        self._spare = self._size - 1 - self._in_place  # receive buffers for each operand

    def __call__(self, sources: Tensors, outputs: Tensors) -> Pending:
        if self._size == 1:
            foreach_copy(outputs, sources)
            return Messages(self._group, [])
        sent = [source.split_with_sizes(sizes) for source, sizes in zip(sources, self._sizes, strict=True)]
        nbytes = [rows[self._rank].nbytes * self._spare for rows in sent]
        buffer = self._pool.take(sum(nbytes))
        received, offset = [], 0
        for rows, output, size in zip(sent, outputs, nbytes, strict=True):
            into = [output] if self._in_place else []
            if size:
                into += buffer[offset : offset + size].view(rows[0].dtype).chunk(self._spare)
            into[self._rank : self._rank] = [rows[self._rank]]
            received.append(into if output.numel() else [output] * self._size)
            offset += size
        finish = partial(_sum, self._pool, buffer, received, outputs)
        return Messages(self._group, _calls(self._group, received, sent, self._tag), finish)


def _sum(pool: ScratchPool, buffer: torch.Tensor, received: Sequence[Tensors], outputs: Tensors) -> None:
    for rows, output in zip(received, outputs, strict=True):
        if output.numel():
            sum_rows(rows, output)
    pool.give_back(buffer)


def _sizes(bounds: Bounds) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


class ReducedThenGathered:
    """An all-reduce in flight as a reduce-scatter, after which each rank's part of the sum is gathered."""

    def __init__(self, comm: "GlooComm", what: What, sources: Tensors, outputs: Tensors):
        assert what.dtype is not None
        size, flat = what.group.size(), sources[0].view(-1)
        part = -(-what.numel // size)
        whole = Operand(flat, [min(rank * part, what.numel) for rank in range(size + 1)])
        self.row = whole.row(what.group.rank())
        self.sum = torch.empty_like(self.row)
        self.gather = comm.plan_all_gather([whole], replace(what, kind="all_reduce, then"))  # with a tag of its own
        self.scatter = comm.plan_reduce_scatter([whole.bounds], what, what.dtype, False)
        self.scattering = self.scatter.start([flat], [self.sum])

    def wait(self) -> None:
        """See `Pending`."""
        self.scatter.wait(self.scattering)
        self.row.copy_(self.sum)
        self.gather.wait(self.gather.start())


class GlooComm(Comm):
    """Point-to-point on gloo. CPU tensors only."""

    direct_min_bytes = 512 * 1024  # below, a separate message costs more than the copies: docs/decisions/gloo.md
    direct_allows_uneven = True

    def __init__(self) -> None:
        self.pool = ScratchPool()

    def release(self) -> None:
        self.pool.free.clear()

    def plan_all_gather(self, operands: Sequence[Operand], what: What) -> Collective:
        rows = [full.split_with_sizes(_sizes(bounds)) for full, bounds in operands]
        mine = [[each[what.group.rank()]] * len(each) for each in rows]
        calls = _calls(what.group, rows, mine, what.tag)
        return PlannedGather(self, operands, partial(Messages, what.group, calls))

    def plan_reduce_scatter(self, bounds: list[Bounds], what: What, dtype: torch.dtype, average: bool) -> Collective:
        size = what.group.size()
        call = SumInRankOrder(self.pool, bounds, what, dtype != what.dtype)
        return PlannedReduction(call, size if average else 1)

    def plan_all_reduce(self, what: What, average: bool) -> Collective:
        """In messages too, so that they say what they are: gloo's own all-reduce adds whatever the other ranks reduce
        at the time. Two ranks, and ranks with little to send, send the whole tensor."""
        size = what.group.size()
        if size == 1:
            return super().plan_all_reduce(what, average)
        is_large = size > 2 and what.nbytes > _WHOLE_BYTES
        call = partial(ReducedThenGathered, self, what) if is_large else partial(self._reduce_whole, what)
        return PlannedReduction(call, size if average else 1)

    def _reduce_whole(self, what: What, sources: Tensors, outputs: Tensors) -> Pending:
        flat, group = sources[0].view(-1), what.group
        rank, size = group.rank(), group.size()
        spare = size if rank > 1 else size - 1
        buffer = self.pool.take(spare * flat.nbytes)
        rows = list(buffer[: spare * flat.nbytes].view(flat.dtype).chunk(spare)) if flat.numel() else [flat] * spare
        if rank <= 1:
            rows[rank:rank] = [flat]
        else:
            rows[rank].copy_(flat)  # the sum of the first two ranks is written over `flat` before it is added
        calls = _calls(group, [rows], [[flat] * size], what.tag)
        return Messages(group, calls, partial(_sum, self.pool, buffer, [rows], [flat]))
