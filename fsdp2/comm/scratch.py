"""Communication in which a rank takes part for the others' sake: of the same sizes, with zeros, and nobody reads the
result. Layer: comm."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fsdp2.comm.base import Comm, Operand, Pending, Scatter


def all_gather_like(comm: Comm, operands: Sequence[Operand], group: dist.ProcessGroup) -> Callable[[], Pending]:
    """Begins an all-gather like that of `operands`, which are not kept."""
    makers = [_like(operand) for operand in operands]
    return lambda: comm.all_gather([make() for make in makers], group)


def reduce_scatter_like(
    comm: Comm, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool
) -> Callable[[], Pending]:
    """Begins a reduce-scatter like that of `scatters`, which are not kept."""
    makers = [(_like(each.source), _zeros_like(each.output)) for each in scatters]
    return lambda: comm.reduce_scatter([Scatter(source(), output()) for source, output in makers], group, average)


def all_reduce_like(
    comm: Comm, tensor: torch.Tensor, group: dist.ProcessGroup, average: bool, mark: int
) -> Callable[[], Pending]:
    """Begins an all-reduce like that of `tensor`, which is not kept."""
    make = _zeros_like(tensor)
    return lambda: comm.all_reduce(make(), group, average, mark)


def _like(operand: Operand) -> Callable[[], Operand]:
    make, bounds, mark = _zeros_like(operand.full), operand.bounds, operand.mark
    return lambda: Operand(make(), bounds, mark)


def _zeros_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return partial(torch.zeros, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
