"""Collectives that are planned and started for once, by functions that return what waits for the end; and those of a
user's own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp2.comm.base import Collective, Comm, Operand, OpInfo, Tensors


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Scatter(NamedTuple):
    """One operand of a reduce-scatter."""

    source: Operand
    output: torch.Tensor


def all_gather(comm: Comm, operands: Sequence[Operand], group: dist.ProcessGroup) -> Callable[[], None]:
    info = info_of("all_gather", [operand.full for operand in operands], group)
    return started(comm.plan_all_gather(operands, info))


def reduce_scatter(
    comm: Comm, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool
) -> Callable[[], None]:
    sources = [each.source.full for each in scatters]
    outputs = [each.output for each in scatters]
    info = info_of("reduce_scatter", sources, group)
    bounds = [each.source.bounds for each in scatters]
    return started(comm.plan_reduce_scatter(bounds, info, average), sources, outputs)


def all_reduce(
    comm: Comm, tensor: torch.Tensor, group: dist.ProcessGroup, average: bool, fqn: str = ""
) -> Callable[[], None]:
    info = info_of("all_reduce", [tensor], group, fqn)
    return started(comm.plan_all_reduce(info, average), [tensor], [tensor])


def info_of(kind: str, tensors: Tensors, group: dist.ProcessGroup, fqn: str = "") -> OpInfo:
    numel, nbytes = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    return OpInfo(kind, fqn, numel, nbytes, tensors[0].dtype, group, tensors[0].device)


def started(collective: Collective, *tensors: Tensors) -> Callable[[], None]:
    return partial(collective.wait, collective.start(*tensors))


class Gathers:
    """An all-gather of the user's own, by the backend's list form."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        outputs = list(output_tensor.chunk(group.size()))
        return dist.all_gather(outputs, input_tensor.clone(), group=group, async_op=async_op)


class Scatters(Gathers):
    """A reduce-scatter of the user's own, as an all-reduce of everything."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        whole = input_tensor.clone()
        dist.all_reduce(whole, group=group, op=dist.ReduceOp.SUM)
        if op == dist.ReduceOp.AVG:
            whole /= group.size()
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])
