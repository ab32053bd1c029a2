"""`NcclComm`: one coalesced group of collectives a unit, straight into and out of the parameters. Layer: comm.

What a GPU must still confirm: that the coalesced calls overlap with compute as one kernel, and the threshold between
the lanes. The calls themselves run in the tests on a fake process group.
"""

from collections.abc import Sequence

import torch.distributed as dist

from fsdp2.comm.base import Comm, Operand, Pending, Scatter, Works

__all__ = ["NcclComm"]


class NcclComm(Comm):
    """NCCL's `all_gather_into_tensor` and `reduce_scatter_tensor`, coalesced. An in-place gather: the input is this
    rank's range of the output, which NCCL knows and does not copy."""

    direct_min_bytes = 256 * 1024
    has_average = True

    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        """See `Comm.all_gather`."""
        rank = group.rank()
        outputs = [operand.full for operand in operands]
        return Works([group.allgather_into_tensor_coalesced(outputs, [operand.row(rank) for operand in operands])])

    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        """See `Comm.reduce_scatter`."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        outputs = [scatter.output for scatter in scatters]
        sources = [scatter.source.full for scatter in scatters]
        return Works([group.reduce_scatter_tensor_coalesced(outputs, sources, options)])
