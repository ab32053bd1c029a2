"""`FlatComm`: one flat all-gather and one flat reduce-scatter per unit; any backend. Layer: comm.

Everything takes the packed lane, so there is exactly one operand of equal ranges.
"""

from collections.abc import Sequence

import torch.distributed as dist

from fsdp2._torch import all_gather_flat, reduce_scatter_flat
from fsdp2.comm.base import Comm, Operand, Pending, Scatter, Works
from fsdp2.comm.wire import WideReduceScatter, is_narrow


class FlatComm(Comm):
    """The backend's own flat collectives, one call per operand."""

    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        rank = group.rank()
        return Works([all_gather_flat(operand.full, operand.row(rank), group) for operand in operands])

    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        if is_narrow(scatters):
            return WideReduceScatter(scatters, group, average)
        op = dist.ReduceOp.AVG if average and self.has_average else dist.ReduceOp.SUM
        works = [reduce_scatter_flat(scatter.output, scatter.source.full, op, group) for scatter in scatters]
        divisor = group.size() if average and not self.has_average else 1
        return Works(works, [scatter.output for scatter in scatters], divisor)
