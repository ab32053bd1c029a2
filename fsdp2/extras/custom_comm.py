"""`AllGather`, `ReduceScatter`: user-defined collectives that replace the backend's. Layer: extras.

The two interfaces are those of torch's FSDP2 (`torch.distributed.fsdp`'s ``set_custom_all_gather`` and
``set_custom_reduce_scatter``), so that an object written for one library works with the other. Only the methods matter;
no subclass is required. `CustomComm` calls them, and two setters of `FSDPModule` install it. A whole group is sent as
one flat tensor, as the interfaces require::

    all-gather       operand's own range --copy--> own slice of allocated tensor ==call==> all --copy--> operand
    reduce-scatter   source --copy--> allocated tensor ==call==> allocated tensor --copy--> output
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp2.comm.base import Bounds, Collective, Comm, Operand, OpInfo, Pending, Tensors
from fsdp2.errors import ArgumentError
from fsdp2.layout import Lane, ShardLayout, choose_lane
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.unit import unit_for
from fsdp2.settings import groups_of


class AllGather(ABC):
    """A custom all-gather, for `FSDPModule.set_custom_all_gather`.

    Each all-gather of the unit calls `allocate` and then the object, on the all-gather stream, on every rank of the
    shard group in the same order (before torch 2.13 this function was called ``all_gather_into_tensor``)::

        class Logged(AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                print("gathers", output_tensor.nbytes, "bytes")
                return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous 1-D tensor of `size` with any content: the output of the next call. It is dropped once
        copied out; an implementation that reuses memory must not return it again before that."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor`, ``[ranks * n]``, with the `input_tensor`, ``[n]``, of every rank in rank order. This
        rank's `input_tensor` is its slice of the output. `async_op` is True: the call may return before the all-gather
        is complete.

        Returns:
            A handle whose `wait` is called before the output is read, or None if it may be read at once (on an
            accelerator: by work enqueued next on the current stream).
        """


class ReduceScatter(ABC):
    """A custom reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`.

    Each reduction of the unit calls `allocate` for the input, then for the output, and then the object, on the
    reduce-scatter stream, on every rank of the shard group in the same order. Example: see `AllGather`.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous 1-D tensor of `size` with any content. It is dropped once the output is copied out."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor`, ``[ranks * n]``, over the ranks; this rank's n elements go to `output_tensor`. `op` is
        ``ReduceOp.AVG`` to divide by the number of ranks, otherwise ``ReduceOp.SUM``; `async_op` is not passed, as in
        torch's FSDP2. Returns as `AllGather.__call__`."""


def allocated(
    allocate: Callable[..., torch.Tensor], numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The tensor that the user's `allocate` returns for `numel` elements.

    Raises:
        ArgumentError: the tensor is not as requested.
    """
    tensor = allocate((numel,), dtype=dtype, device=device)
    if tensor.shape != (numel,) or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ArgumentError(
            f"{type(getattr(allocate, '__self__', allocate)).__name__}.allocate: expected a contiguous tensor of size "
            f"({numel},), {dtype}, on {device}; got {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}, strides "
            f"{tensor.stride()}. Return what was asked for, for example torch.empty(size, dtype=dtype, device=device)."
        )
    return tensor


class CopyOut(NamedTuple):
    """A custom collective in flight. Its results are copied to their destinations; `kept` holds what it reads."""

    works: Sequence[dist.Work | None]
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    kept: Tensors = ()

    def wait(self) -> None:
        """See `Pending`."""
        for work in self.works:
            if work is not None:
                work.wait()
        for destination, source in self.copies:
            destination.copy_(source)


Pair = tuple[AllGather | None, ReduceScatter | None]


class CustomComm(Comm):
    """`base` with its all-gather, its reduce-scatter, or both replaced by custom ones.

    The replaced collectives do not use the direct lane. Every rank must replace the same ones.
    """

    def __init__(self, base: Comm, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None):
        self.base = base
        self.custom_all_gather = all_gather
        self.custom_reduce_scatter = reduce_scatter
        self.direct_min_bytes = base.direct_min_bytes if all_gather is None else None
        self.direct_allows_uneven = base.direct_allows_uneven
        self.has_average = base.has_average or reduce_scatter is not None
        self.by_user: Pair = (None, None)  # those of the collectives above that come from the user
        self.in_memory: Pair = (None, None)  # those that only use other memory

    def scatter_lane(self, layout: ShardLayout, itemsize: int) -> Lane:
        if self.custom_reduce_scatter is None:
            return self.base.scatter_lane(layout, itemsize)
        return choose_lane(layout, itemsize, None, self.direct_allows_uneven)

    def plan_all_gather(self, operands: Sequence[Operand], info: OpInfo) -> Collective:
        if self.custom_all_gather is None:
            return self.base.plan_all_gather(operands, info)
        call = partial(_gather, self.custom_all_gather, operands, info.group)
        return Collective(info, call, self, operands)

    def plan_reduce_scatter(self, bounds: list[Bounds], info: OpInfo, average: bool) -> Collective:
        if self.custom_reduce_scatter is None:
            return self.base.plan_reduce_scatter(bounds, info, average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return Collective(info, partial(_scatter, self.custom_reduce_scatter, op, info.group))

    def plan_all_reduce(self, info: OpInfo, average: bool) -> Collective:
        return self.base.plan_all_reduce(info, average)


def _gather(gather: AllGather, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
    """One call per operand (the packed lane has only one)."""
    rank = group.rank()
    works, copies = [], []
    for operand in operands:
        full = operand.full
        whole = Operand(allocated(gather.allocate, full.numel(), full.dtype, full.device), operand.bounds)
        row = whole.row(rank)
        row.copy_(operand.row(rank))
        works.append(gather(output_tensor=whole.full, input_tensor=row, group=group, async_op=True))
        copies.append((full, whole.full))
    return CopyOut(works, copies)


def _scatter(scatter: ReduceScatter, op: Any, group: dist.ProcessGroup, sources: Tensors, outputs: Tensors) -> Pending:
    """One call per operand (the packed lane has only one)."""
    works, copies, kept = [], [], []
    for full, output in zip(sources, outputs, strict=True):
        source = allocated(scatter.allocate, full.numel(), full.dtype, full.device)
        result = allocated(scatter.allocate, output.numel(), output.dtype, output.device)
        source.copy_(full)
        works.append(scatter(output_tensor=result, input_tensor=source, group=group, op=op))
        copies.append((output, result))
        kept.append(source)
    return CopyOut(works, copies, kept)


def customised_by_user(group: Bucket) -> bool:
    """Whether the user has set custom collectives for this group."""
    return isinstance(group.channel.comm, CustomComm) and group.channel.comm.by_user != (None, None)


def customise(group: Bucket, by_user: Pair = (None, None), in_memory: Pair | None = None) -> None:
    """Let the group use the user's collectives (None leaves one unchanged), and `in_memory` where the user has set
    none."""
    old = group.channel.comm if isinstance(group.channel.comm, CustomComm) else CustomComm(group.channel.comm)
    by_user = (by_user[0] or old.by_user[0], by_user[1] or old.by_user[1])
    in_memory = old.in_memory if in_memory is None else in_memory
    new = CustomComm(old.base, by_user[0] or in_memory[0], by_user[1] or in_memory[1])
    new.by_user, new.in_memory = by_user, in_memory
    group.channel.comm = old.base if by_user == in_memory == (None, None) else new
    group.channel_changed()


def _set_all_gather(module: object, comm: AllGather) -> None:
    for group in _groups_of_one_mesh(module, "set_custom_all_gather"):
        customise(group, by_user=(comm, None))


def _set_reduce_scatter(module: object, comm: ReduceScatter) -> None:
    groups = _groups_of_one_mesh(module, "set_custom_reduce_scatter")
    if unit_for(module).policy.reduce_scatter_dtype is not None:
        raise ArgumentError(
            "set_custom_reduce_scatter: the unit's reduce_scatter_dtype needs an exchange of our own; leave one out"
        )
    for group in groups:
        customise(group, by_user=(None, comm))


def _groups_of_one_mesh(module: object, call: str) -> list[Bucket]:
    """The unit's groups that are sharded, which must be on one mesh."""
    groups = groups_of(module)
    meshes = {group.roles.mesh for group in groups}
    if len(meshes) > 1:
        raise ArgumentError(f"{call}: expected the unit's parameters on one mesh, got {sorted(map(str, meshes))}")
    return [group for group in groups if group.roles.shard_group is not None]


hooks.setters["set_custom_all_gather"] = _set_all_gather
hooks.setters["set_custom_reduce_scatter"] = _set_reduce_scatter
