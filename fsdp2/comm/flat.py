"""The backend's own collectives, one call for a unit: `FlatComm` for any backend, `NcclComm` for NCCL. Layer: comm.

NCCL was run with ranks that share a GPU (`tests/gpu/nccl.py`). The threshold between the lanes is not confirmed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch import GATHER_OPTIONS, collective_of, scatter_options
from fsdp2.comm.base import Bounds, Collective, Comm, Operand, OpInfo, Tensors


class FlatComm(Comm):
    """One flat collective. Everything takes the packed lane, so there is one operand, of equal ranges."""

    def plan_all_gather(self, operands: Sequence[Operand], info: OpInfo) -> Collective:
        (operand,) = operands
        output, source = map(_as_numbers, (operand.full, operand.row(info.group.rank())))
        call = partial(collective_of(info.group, "all_gather_single"), output, source, GATHER_OPTIONS)
        return Collective(info, call, self, operands)

    def plan_reduce_scatter(self, bounds: list[Bounds], info: OpInfo, average: bool) -> Collective:
        return _reduction(info, average, _scatter, "reduce_scatter_single")


class NcclComm(FlatComm):
    """Coalesced collectives, straight into and out of the parameters. The gather is in place: the input is this rank's
    range of the output, which NCCL detects and does not copy."""

    direct_min_bytes = 256 * 1024
    has_average = True

    def plan_all_gather(self, operands: Sequence[Operand], info: OpInfo) -> Collective:
        outputs = [_as_numbers(operand.full) for operand in operands]
        sources = [_as_numbers(operand.row(info.group.rank())) for operand in operands]
        call = partial(collective_of(info.group, "all_gather_single_coalesced"), outputs, sources)
        return Collective(info, call, self, operands)

    def plan_reduce_scatter(self, bounds: list[Bounds], info: OpInfo, average: bool) -> Collective:
        return _reduction(info, average, _scatter_coalesced, "reduce_scatter_single_coalesced")


def _reduction(info: OpInfo, average: bool, scatter: Any, name: str) -> Collective:
    options = scatter_options(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    return Collective(info, partial(scatter, collective_of(info.group, name), options))


def _scatter(method: Any, options: Any, sources: Tensors, outputs: Tensors) -> Any:
    return method(outputs[0], sources[0], options)


def _scatter_coalesced(method: Any, options: Any, sources: Tensors, outputs: Tensors) -> Any:
    return method(list(map(_as_real, outputs)), list(map(_as_real, sources)), options)


# Dtypes that backends lack (for NCCL see `ncclDataType` in torch's NCCLUtils.hpp); others are not used in training.
_OTHERS = frozenset((torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64))


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _OTHERS else tensor


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor
