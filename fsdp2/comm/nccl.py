"""`NcclComm`: one coalesced group of collectives per unit, straight into and out of the parameters. Layer: comm.

Run on NCCL with ranks that share a GPU (`tests/gpu/nccl.py`), where no time means anything. Not confirmed: the
threshold between the lanes, and that an exchange of narrow rows (`comm.wire`) is faster than a reduce-scatter of wide
ones.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import all_gather_flat_coalesced, reduce_scatter_flat_coalesced
from fsdp2.comm.base import Comm, Operand, Pending, Scatter, Works
from fsdp2.comm.wire import WideReduceScatter, is_narrow


class NcclComm(Comm):
    """NCCL's flat all-gather and reduce-scatter, coalesced. The gather is in place: the input is this rank's range of
    the output, which NCCL detects and does not copy."""

    direct_min_bytes = 256 * 1024
    has_average = True

    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        rank = group.rank()
        outputs = [_as_numbers(operand.full) for operand in operands]
        sources = [_as_numbers(operand.row(rank)) for operand in operands]
        return Works([all_gather_flat_coalesced(outputs, sources, group)])

    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        if is_narrow(scatters):
            return WideReduceScatter(scatters, group, average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        outputs = [_as_real(scatter.output) for scatter in scatters]
        sources = [_as_real(scatter.source.full) for scatter in scatters]
        return Works([reduce_scatter_flat_coalesced(outputs, sources, op, group)])


# What NCCL has no type for; torch has more, which nobody trains with (`ncclDataType` in its NCCLUtils.hpp).
_OTHERS = frozenset((torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64))


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _OTHERS else tensor


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor
