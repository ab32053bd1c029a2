"""`GlooComm`: point-to-point messages straight into the destination's rows. Layer: comm.

Each rank sends every other rank its range, and receives theirs in place. In a reduce-scatter it receives the others'
data for its range, and sums in rank order. gloo's own collectives stage their data, and take up to twice as long:
docs/decisions/gloo.md. A message's tag says of which unit and operation it is: ranks that run units in a different
order never take each other's weights, but wait for messages that do not come, which the watchdog reports.
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

Add = Callable[[Tensors, torch.Tensor], None]

_WHOLE_BYTES = 64 * 1024  # of an all-reduce: below, the second round of messages costs more than the bytes
_KEPT_BUFFERS = 4

Message = tuple[Callable[[list[torch.Tensor], int, int], dist.Work], list[torch.Tensor], int, int]


class ScratchPool:
    """Reusable receive buffers: the page faults of a fresh large CPU tensor cost about as much as the copy into it. A
    buffer belongs to its user until it is returned; the pool keeps the few largest."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []  # by size

    def take(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of at least `nbytes`: the smallest free one that is large enough, otherwise a new one."""
        fitting = next((index for index, buffer in enumerate(self.free) if buffer.numel() >= nbytes), None)
        return torch.empty(nbytes, dtype=torch.uint8) if fitting is None or not nbytes else self.free.pop(fitting)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next caller use `buffer`."""
        if buffer.numel():
            self.free = sorted([*self.free, buffer], key=torch.Tensor.numel)[-_KEPT_BUFFERS:]


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
        for work in self.works:
            work.wait()
        self.is_waited_for = True
        if self.finish is not None:
            self.finish()

    def __del__(self) -> None:
        if not self.is_waited_for:  # or not for all, after an error
            keep_unwaited([work for work in self.works if not work.is_completed()], self.group)


def _sizes(bounds: Bounds) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


def _start_sum(
    pool: ScratchPool, what: What, sizes: Sequence[Sequence[int]], add: Add, sources: Tensors, outputs: Tensors
) -> Pending:
    """Start a reduce-scatter, whose rows are summed by `add` when all have arrived. The first row is received in the
    output if it has its dtype, so two ranks need no other memory."""
    in_place = sources[0].dtype == outputs[0].dtype
    group, rank, num_ranks = what.group, what.group.rank(), what.group.size()
    if num_ranks == 1:
        foreach_copy(outputs, sources)
        return Messages(group, [])
    spare = num_ranks - 1 - in_place  # receive buffers for each operand
    sent = [source.split_with_sizes(each) for source, each in zip(sources, sizes, strict=True)]
    nbytes = [rows[rank].nbytes * spare for rows in sent]
    buffer = pool.take(sum(nbytes))
    received, offset = [], 0
    for rows, output, size in zip(sent, outputs, nbytes, strict=True):
        into = [output] if in_place else []
        if size:
            into += buffer[offset : offset + size].view(rows[0].dtype).chunk(spare)
        into[rank:rank] = [rows[rank]]
        received.append(into if output.numel() else [output] * num_ranks)
        offset += size
    return Messages(group, _calls(group, received, sent, what.tag), partial(_sum, add, pool, buffer, received, outputs))


def _add(rows: Tensors, output: torch.Tensor) -> None:
    """``output = rows[0] + rows[1] + ...``, in this order."""
    torch.add(rows[0], rows[1], out=output)
    for row in rows[2:]:
        output.add_(row)


def _sum(add: Add, pool: ScratchPool, buffer: torch.Tensor, received: Sequence[Tensors], outputs: Tensors) -> None:
    for rows, output in zip(received, outputs, strict=True):
        if output.numel():
            add(rows, output)
    pool.give_back(buffer)


def _reduce_whole(pool: ScratchPool, what: What, sources: Tensors, outputs: Tensors) -> Pending:
    """Start an all-reduce in which each rank sends all it has to every other one."""
    flat, group = sources[0].view(-1), what.group
    rank, size = group.rank(), group.size()
    spare = size if rank > 1 else size - 1
    buffer = pool.take(spare * flat.nbytes)
    rows = list(buffer[: spare * flat.nbytes].view(flat.dtype).chunk(spare)) if flat.numel() else [flat] * spare
    if rank <= 1:
        rows[rank:rank] = [flat]
    else:
        rows[rank].copy_(flat)  # the sum of the first two ranks is written over `flat` before it is added
    calls = _calls(group, [rows], [[flat] * size], what.tag)
    return Messages(group, calls, partial(_sum, _add, pool, buffer, [rows], [flat]))


class ReducedThenGathered:
    """An all-reduce in flight as a reduce-scatter, after which each rank's part of the sum is gathered."""

    def __init__(self, comm: "GlooComm", what: What, sources: Tensors, outputs: Tensors):
        size, flat = what.group.size(), sources[0].view(-1)
        part = -(-what.numel // size)
        whole = Operand(flat, [min(rank * part, what.numel) for rank in range(size + 1)])
        self.row = whole.row(what.group.rank())
        self.sum = torch.empty_like(self.row)
        self.gather = comm.plan_all_gather([whole], replace(what, kind="all_reduce, then"))  # with a tag of its own
        self.scatter = comm.plan_reduce_scatter([whole.bounds], what, False)
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

    def plan_all_gather(self, operands: Sequence[Operand], what: What) -> Collective:
        rows = [full.split_with_sizes(_sizes(bounds)) for full, bounds in operands]
        mine = [[each[what.group.rank()]] * len(each) for each in rows]
        return PlannedGather(self, operands, partial(Messages, what.group, _calls(what.group, rows, mine, what.tag)))

    def plan_reduce_scatter(self, bounds: list[Bounds], what: What, average: bool) -> Collective:
        return PlannedReduction(self.sum_of(bounds, what, _add), what.group.size() if average else 1)

    def sum_of(self, bounds: list[Bounds], what: What, add: Add) -> Callable[[Tensors, Tensors], Pending]:
        """What starts a reduce-scatter with these bounds; `add` sums rows into an output."""
        return partial(_start_sum, self.pool, what, list(map(_sizes, bounds)), add)

    def plan_all_reduce(self, what: What, average: bool) -> Collective:
        """In messages too, so that they say what they are: gloo's own all-reduce adds whatever the other ranks reduce
        at the time. Two ranks, and ranks with little to send, send the whole tensor."""
        size = what.group.size()
        if size == 1:
            return super().plan_all_reduce(what, average)
        is_large = size > 2 and what.nbytes > _WHOLE_BYTES
        call = partial(ReducedThenGathered, self, what) if is_large else partial(_reduce_whole, self.pool, what)
        return PlannedReduction(call, size if average else 1)
