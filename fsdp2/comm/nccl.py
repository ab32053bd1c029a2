"""`NcclComm`: one coalesced group of collectives per unit, straight into and out of the parameters. Layer: comm.

Run on NCCL with ranks that share a GPU (`tests/gpu/nccl.py`), where no time means anything. Not confirmed: the
threshold between the lanes, and that an exchange of narrow rows (`comm.wire`) is faster than a reduce-scatter of wide
ones.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch import collective_of, scatter_options
from fsdp2.comm.base import Bounds, Collective, Comm, Operand, PlannedGather, PlannedReduction, Tensors, What
from fsdp2.comm.wire import WideReduceScatter


class NcclComm(Comm):
    """NCCL's flat all-gather and reduce-scatter, coalesced. The gather is in place: the input is this rank's range of
    the output, which NCCL detects and does not copy."""

    direct_min_bytes = 256 * 1024
    has_average = True

    def plan_all_gather(self, operands: Sequence[Operand], what: What) -> Collective:
        rank = what.group.rank()
        outputs = [_as_numbers(operand.full) for operand in operands]
        sources = [_as_numbers(operand.row(rank)) for operand in operands]
        return PlannedGather(
            self, operands, partial(collective_of(what.group, "all_gather_single_coalesced"), outputs, sources)
        )

    def plan_reduce_scatter(self, bounds: list[Bounds], what: What, dtype: torch.dtype, average: bool) -> Collective:
        if dtype != what.dtype:
            return PlannedReduction(partial(WideReduceScatter, what.group), what.group.size() if average else 1)
        options = scatter_options(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        return PlannedReduction(
            partial(_scatter, collective_of(what.group, "reduce_scatter_single_coalesced"), options), 1
        )


def _scatter(method: Any, options: Any, sources: Tensors, outputs: Tensors) -> Any:
    return method(list(map(_as_real, outputs)), list(map(_as_real, sources)), options)


# What NCCL has no type for; torch has more, which nobody trains with (`ncclDataType` in its NCCLUtils.hpp).
_OTHERS = frozenset((torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64))


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _OTHERS else tensor


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor
