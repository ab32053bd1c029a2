"""`FlatComm`: one flat all-gather and one flat reduce-scatter per unit; any backend. Layer: comm.

Everything takes the packed lane, so there is exactly one operand of equal ranges.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch import GATHER_OPTIONS, collective_of, scatter_options
from fsdp2.comm.base import Bounds, Collective, Comm, Operand, PlannedGather, PlannedReduction, Tensors, What
from fsdp2.comm.wire import WideReduceScatter


class FlatComm(Comm):
    """The backend's own flat collectives."""

    def plan_all_gather(self, operands: Sequence[Operand], what: What) -> Collective:
        (operand,) = operands
        pair = operand.full, operand.row(what.group.rank())
        output, source = map(torch.view_as_real, pair) if operand.full.is_complex() else pair
        return PlannedGather(
            self, operands, partial(collective_of(what.group, "all_gather_single"), output, source, GATHER_OPTIONS)
        )

    def plan_reduce_scatter(self, bounds: list[Bounds], what: What, dtype: torch.dtype, average: bool) -> Collective:
        divisor = what.group.size() if average else 1
        if dtype != what.dtype:
            return PlannedReduction(partial(WideReduceScatter, what.group), divisor)
        options = scatter_options(dist.ReduceOp.SUM)
        return PlannedReduction(partial(_scatter, collective_of(what.group, "reduce_scatter_single"), options), divisor)


def _scatter(method: Any, options: Any, sources: Tensors, outputs: Tensors) -> Any:
    (source,), (output,) = sources, outputs
    return method(output, source, options)
