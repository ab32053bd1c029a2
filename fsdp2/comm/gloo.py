"""`GlooComm`: point-to-point messages straight into the destination's rows. Layer: comm.

gloo's own all-gather and reduce-scatter stage their data and take up to twice as long (its reduce-scatter is slower
than its all-reduce), see docs/decisions/gloo.md. Here each rank sends its range to every other rank and receives theirs
in place; in a reduce-scatter it receives the others' data for its range and sums in rank order, so that the result does
not depend on the order of arrival.

A message's tag says of which unit and operation it is. So ranks that run units in a different order do not receive
each other's weights: what they wait for does not come, which the watchdog reports. Several messages may be in flight at
once; those of one tag are issued in the same order on every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.comm.base import Comm, Operand, Pending, Scatter, Works
from fsdp2.comm.unwaited import finish_unwaited, keep_unwaited
from fsdp2.comm.wire import is_narrow, sum_rows

_GATHER_TAG = 0x46530001  # unlikely to be a tag of the user's own messages in this group
_SCATTER_TAG = 0x46530002
_WHOLE_BYTES = 64 * 1024  # of an all-reduce: below, the second round of messages costs more than the bytes


def _tag(mark: int, otherwise: int) -> int:
    return mark & 0x3FFFFFFF | 0x40000000 if mark else otherwise


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


class Messages(Works):
    """Messages in flight."""

    def __init__(
        self,
        works: list[dist.Work],
        group: dist.ProcessGroup,
        outputs: Sequence[torch.Tensor] = (),
        divisor: int = 1,
    ):
        super().__init__(works, outputs, divisor)
        self.group = group
        self.is_waited_for = not works

    def wait(self) -> None:
        self.is_waited_for = True
        super().wait()

    def __del__(self) -> None:
        if not self.is_waited_for:
            keep_unwaited(self.works, self.group)


class SumInRankOrder(Messages):
    """A reduce-scatter in flight, whose rows are summed when all have arrived."""

    def __init__(
        self,
        works: list[dist.Work],
        group: dist.ProcessGroup,
        received: list[list[torch.Tensor]],
        outputs: list[torch.Tensor],
        divisor: int,
        scratch: tuple[ScratchPool, torch.Tensor],
    ):
        super().__init__(works, group, outputs, divisor)
        self.received = received
        self.scratch = scratch

    def complete(self) -> None:
        for rows, output in zip(self.received, self.outputs, strict=True):
            sum_rows(rows, output)
        pool, buffer = self.scratch
        self.received = []
        pool.give_back(buffer)


class ReducedThenGathered:
    """An all-reduce in flight as a reduce-scatter, after which each rank's part of the sum is gathered."""

    def __init__(self, comm: "GlooComm", flat: torch.Tensor, group: dist.ProcessGroup, average: bool, mark: int):
        size = group.size()
        part = -(-flat.numel() // size)
        self.comm = comm
        self.group = group
        self.whole = Operand(flat, [min(rank * part, flat.numel()) for rank in range(size + 1)], mark ^ 1)
        self.sum = torch.empty_like(self.whole.row(group.rank()))
        source = Operand(flat, self.whole.bounds, mark)
        self.scattering = comm.reduce_scatter([Scatter(source, self.sum)], group, average)

    def wait(self) -> None:
        """See `Pending`."""
        self.scattering.wait()
        self.whole.row(self.group.rank()).copy_(self.sum)
        self.comm.all_gather([self.whole], self.group).wait()


class GlooComm(Comm):
    """Point-to-point on gloo. CPU tensors only."""

    direct_min_bytes = 512 * 1024  # below, a separate message costs more than the copies: docs/decisions/gloo.md
    direct_allows_uneven = True

    def __init__(self) -> None:
        self.pool = ScratchPool()

    def release(self) -> None:
        self.pool.free.clear()

    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        rank, size = group.rank(), group.size()
        finish_unwaited(group)
        works = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            for operand in operands:
                rows, tag = operand.rows, _tag(operand.mark, _GATHER_TAG)
                if rows[source].numel():
                    works.append(group.recv([rows[source]], source, tag))
                if rows[rank].numel():
                    works.append(group.send([rows[rank]], to, tag))
        return Messages(works, group)

    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        """The first row is received directly in the output if it has the output's dtype, so two ranks need no other
        memory."""
        rank, size = group.rank(), group.size()
        scatters = [scatter for scatter in scatters if scatter.source.full.numel()]
        if size == 1:
            foreach_copy([each.output for each in scatters], [each.source.row(0) for each in scatters])
            return Works([])
        finish_unwaited(group)
        in_place = not is_narrow(scatters)
        spare = size - 1 - in_place
        sizes = [s.output.numel() * s.source.full.itemsize for s in scatters]  # rows are sent in the source's dtype
        buffer = self.pool.take(sum(sizes) * spare)
        received, offset = [], 0
        for scatter, nbytes in zip(scatters, sizes, strict=True):
            rows = [scatter.output] if in_place else []
            if nbytes and spare:
                rows += buffer[offset : offset + nbytes * spare].view(scatter.source.full.dtype).chunk(spare)
            rows[rank:rank] = [scatter.source.row(rank)]
            received.append(rows)
            offset += nbytes * spare
        works = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            for scatter, rows in zip(scatters, received, strict=True):
                tag = _tag(scatter.source.mark, _SCATTER_TAG)
                if scatter.output.numel():
                    works.append(group.recv([rows[source]], source, tag))
                sent = scatter.source.row(to)
                if sent.numel():
                    works.append(group.send([sent], to, tag))
        mine = [(rows, s.output) for rows, s in zip(received, scatters, strict=True) if s.output.numel()]
        return SumInRankOrder(
            works,
            group,
            [rows for rows, _ in mine],
            [output for _, output in mine],
            size if average else 1,
            (self.pool, buffer),
        )

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, average: bool, mark: int = 0) -> Pending:
        """In messages too, so that they say what they are: gloo's own all-reduce adds whatever the other ranks reduce
        at the time. Two ranks, and ranks with little to send, send the whole tensor."""
        rank, size = group.rank(), group.size()
        if not mark or size == 1 or not tensor.is_contiguous():
            return super().all_reduce(tensor, group, average)
        flat, tag = tensor.view(-1), _tag(mark, 0)
        if size > 2 and flat.nbytes > _WHOLE_BYTES:
            return ReducedThenGathered(self, flat, group, average, mark)
        finish_unwaited(group)
        spare = size if rank > 1 else size - 1
        buffer = self.pool.take(spare * flat.nbytes)
        rows = list(buffer[: spare * flat.nbytes].view(flat.dtype).chunk(spare)) if flat.numel() else []
        if rows and rank <= 1:
            rows[rank:rank] = [flat]
        elif rows:
            rows[rank].copy_(flat)  # the sum of the first two ranks is written over `flat` before it is added
        works = []
        for step in range(1, size) if rows else ():
            to, source = (rank + step) % size, (rank - step) % size
            works += [group.recv([rows[source]], source, tag), group.send([flat], to, tag)]
        received, outputs = ([rows], [flat]) if rows else ([], [])
        return SumInRankOrder(works, group, received, outputs, size if average else 1, (self.pool, buffer))
