"""Collectives that are planned and started for once. Each function returns what waits for the end."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp2.comm.base import Collective, Comm, Operand, Tensors, What


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Scatter(NamedTuple):
    """One operand of a reduce-scatter."""

    source: Operand
    output: torch.Tensor


def all_gather(comm: Comm, operands: Sequence[Operand], group: dist.ProcessGroup) -> Callable[[], None]:
    what = what_of("all_gather", [operand.full for operand in operands], group)
    return started(comm.plan_all_gather(operands, what))


def reduce_scatter(
    comm: Comm, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool
) -> Callable[[], None]:
    sources = [each.source.full for each in scatters]
    outputs = [each.output for each in scatters]
    what = what_of("reduce_scatter", sources, group)
    bounds = [each.source.bounds for each in scatters]
    return started(comm.plan_reduce_scatter(bounds, what, average), sources, outputs)


def all_reduce(
    comm: Comm, tensor: torch.Tensor, group: dist.ProcessGroup, average: bool, fqn: str = ""
) -> Callable[[], None]:
    what = what_of("all_reduce", [tensor], group, fqn)
    return started(comm.plan_all_reduce(what, average), [tensor], [tensor])


def what_of(kind: str, tensors: Tensors, group: dist.ProcessGroup, fqn: str = "") -> What:
    numel, nbytes = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    return What(kind, fqn, numel, nbytes, tensors[0].dtype, group, tensors[0].device)


def started(collective: Collective, *tensors: Tensors) -> Callable[[], None]:
    return partial(collective.wait, collective.start(*tensors))
