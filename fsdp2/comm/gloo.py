"""`GlooComm`: point-to-point messages straight into the destination's rows. Layer: comm.

Each rank sends its range to every other rank, and receives theirs in place. In a reduce-scatter it receives the others'
data for its range, and sums in rank order. gloo's own collectives stage their data, and take up to twice as long
(docs/decisions.md). A message's tag identifies its unit and operation: ranks that run units in a different order never
receive the wrong weights, but wait for messages that do not come, which the watchdog reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.comm.base import Bounds, Collective, Comm, Operand, OpInfo, Pending, Tensors

_WHOLE_BYTES = 64 * 1024  # of an all-reduce; below, a second round of messages costs more than sending everything

Add = Callable[[Tensors, torch.Tensor], None]

Message = tuple[Callable[[list[torch.Tensor], int, int], dist.Work], list[torch.Tensor], int, int]


def _calls(group: dist.ProcessGroup, received: Sequence[Tensors], sent: Sequence[Tensors], tag: int) -> list[Message]:
    """The sends and receives of this rank, as calls: for each operand it receives ``received[operand][rank]`` from that
    rank, and sends ``sent[operand][rank]`` to it."""
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


# gloo cannot cancel a message. If a receive is freed before its message arrives, all later messages between the two
# ranks are blocked, whatever their tag: the next barrier hangs (torch 2.13). So, after an exception, the handles that
# were not waited for are kept until the group is used again. By then all ranks have sent their messages.
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
    """Messages in flight; `finish` is called when all have arrived."""

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
        if not self.is_waited_for:  # or only partly, after an error
            keep_unwaited([work for work in self.works if not work.is_completed()], self.group)


def _sizes(bounds: Bounds) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


def _start_sum(info: OpInfo, sizes: Sequence[Sequence[int]], add: Add, sources: Tensors, outputs: Tensors) -> Pending:
    """Start a reduce-scatter, whose rows `add` sums when all have arrived. The first row is received directly in the
    output if the dtypes match, so two ranks need no extra memory."""
    in_place = sources[0].dtype == outputs[0].dtype
    group, rank, num_ranks = info.group, info.group.rank(), info.group.size()
    if num_ranks == 1:
        foreach_copy(outputs, sources)
        return Messages(group, [])
    sent = [source.split_with_sizes(each) for source, each in zip(sources, sizes, strict=True)]
    received = []
    for rows, output in zip(sent, outputs, strict=True):
        into = [output] * in_place + [torch.empty_like(rows[rank]) for _ in range(num_ranks - 1 - in_place)]
        received.append([*into[:rank], rows[rank], *into[rank:]])
    return Messages(group, _calls(group, received, sent, info.tag), partial(_sum, add, received, outputs))


def _sum(add: Add, received: Sequence[Tensors], outputs: Tensors) -> None:
    for rows, output in zip(received, outputs, strict=True):
        if output.numel():
            add(rows, output)


def _add(rows: Tensors, output: torch.Tensor) -> None:
    """``output = rows[0] + rows[1] + ...``, in this order."""
    torch.add(rows[0], rows[1], out=output)
    for row in rows[2:]:
        output.add_(row)


class AllReduced:
    """An all-reduce in flight, done as a reduce-scatter: every rank sums everything, or a part that is gathered
    afterwards."""

    def __init__(self, comm: "GlooComm", info: OpInfo, sources: Tensors, outputs: Tensors):
        size, flat = info.group.size(), sources[0].view(-1)
        self.gather: Collective | None = None
        bounds: Bounds = range(size + 1)
        if size <= 2 or info.nbytes <= _WHOLE_BYTES:
            source, self.row = flat.expand(size, -1), flat[None]
        else:
            part = -(-info.numel // size)
            whole = Operand(flat, [min(rank * part, info.numel) for rank in range(size + 1)])
            source, bounds, self.row = flat, whole.bounds, whole.row(info.group.rank())
            self.gather = comm.plan_all_gather([whole], replace(info, kind="all_reduce, then"))  # with its own tag
        self.sum = torch.empty_like(self.row)
        self.scattering = comm.plan_reduce_scatter([bounds], info, False).call([source], [self.sum])

    def wait(self) -> None:
        """See `Pending`."""
        self.scattering.wait()
        self.row.copy_(self.sum)
        if self.gather is not None:
            self.gather.call().wait()


class GlooComm(Comm):
    """Point-to-point on gloo. CPU tensors only."""

    direct_min_bytes = 512 * 1024  # below, a separate message costs more than the copies: docs/decisions.md
    direct_allows_uneven = True

    def plan_all_gather(self, operands: Sequence[Operand], info: OpInfo) -> Collective:
        rows = [full.split_with_sizes(_sizes(bounds)) for full, bounds in operands]
        mine = [[each[info.group.rank()]] * len(each) for each in rows]
        return Collective(info, partial(Messages, info.group, _calls(info.group, rows, mine, info.tag)), self, operands)

    def plan_reduce_scatter(self, bounds: list[Bounds], info: OpInfo, average: bool, add: Add = _add) -> Collective:
        """`add` sums rows into an output."""
        return Collective(info, partial(_start_sum, info, list(map(_sizes, bounds)), add))

    def plan_all_reduce(self, info: OpInfo, average: bool) -> Collective:
        """Uses tagged messages too: gloo's own all-reduce would sum different tensors if the ranks' orders differ."""
        return Collective(info, partial(AllReduced, self, info))
