"""`FlatComm`: one flat all-gather and one flat reduce-scatter per unit; any backend. Layer: comm.

Everything takes the packed lane, so there is exactly one operand of equal ranges.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import all_gather_flat, reduce_scatter_flat
from fsdp2.comm.base import Comm, Operand, Pending, Scatter, Works
from fsdp2.comm.wire import Exchange, is_narrow

__all__ = ["FlatComm"]


class ReduceScatter(Works):
    """A reduce-scatter in flight, with the division for backends that do not divide."""

    def __init__(self, works: Sequence[dist.Work], outputs: Sequence[torch.Tensor], divisor: int):
        super().__init__(works)
        self.outputs = outputs
        self.divisor = divisor

    def wait(self) -> None:
        """See `Pending.wait`."""
        super().wait()
        if self.divisor != 1:
            for output in self.outputs:
                output.div_(self.divisor)


class FlatComm(Comm):
    """The backend's own flat collectives, one call per operand."""

    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        """See `Comm.all_gather`."""
        rank = group.rank()
        return Works([all_gather_flat(operand.full, operand.row(rank), group) for operand in operands])

    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        """See `Comm.reduce_scatter`."""
        if is_narrow(scatters):
            return Exchange(scatters, group, average)
        op = dist.ReduceOp.AVG if average and self.has_average else dist.ReduceOp.SUM
        works = [reduce_scatter_flat(scatter.output, scatter.source.full, op, group) for scatter in scatters]
        divisor = group.size() if average and not self.has_average else 1
        return ReduceScatter(works, [scatter.output for scatter in scatters], divisor)
