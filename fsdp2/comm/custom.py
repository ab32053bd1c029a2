"""Custom collectives: two interfaces, and the `Comm` that calls their implementations. Layer: comm.

Both interfaces are those of torch's FSDP2 (`torch.distributed.fsdp`'s ``set_custom_all_gather`` and
``set_custom_reduce_scatter``), so that an object written for one library works with the other; only the methods matter,
and no subclass is required. A whole group is sent in one flat tensor, as the interfaces require::

    all-gather       operand's own range --copy--> own slice of what `allocate` gave ==call==> all --copy--> operand
    reduce-scatter   source --copy--> what `allocate` gave ==call==> what `allocate` gave --copy--> output
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp2.comm.base import Bounds, Collective, Comm, Operand, Pending, PlannedGather, PlannedReduction, Tensors, What
from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["AllGather", "CustomComm", "ReduceScatter"]


class AllGather(ABC):
    """A custom all-gather, for `FSDPModule.set_custom_all_gather`.

    Each all-gather of the unit calls `allocate` and then the object, on the all-gather stream, on every rank of the
    shard group in the same order::

        class Logged(AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                print("gathers", output_tensor.nbytes, "bytes")
                return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    (Before torch 2.13 that function was called ``all_gather_into_tensor``.)
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous 1-D tensor of `size` with any content: the output of the next call. It is dropped when
        it has been copied out; an implementation that reuses it must not return it again before that."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor`, ``[ranks * n]``, with the `input_tensor`, ``[n]``, of every rank in rank order.

        Args:
            input_tensor: this rank's slice of `output_tensor`, filled.
            async_op: True: the call may return before the all-gather is complete.

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
        """Return a contiguous 1-D tensor of `size` with any content. It is dropped when the output has been copied
        out."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor`, ``[ranks * n]``, over the ranks; this rank's n elements go to `output_tensor`.

        Args:
            op: ``ReduceOp.AVG`` to divide by the number of ranks, otherwise ``ReduceOp.SUM``.
            async_op: not passed, as in torch's FSDP2.

        Returns:
            As `AllGather.__call__`.
        """


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
    """A custom collective in flight, whose results are copied to their destinations; `kept` is what it reads."""

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


class CustomComm(Comm):
    """`base` with its all-gather, its reduce-scatter, or both replaced by custom ones.

    The direct lane is off for the replaced collectives. Every rank must replace the same collectives.
    """

    def __init__(self, base: Comm, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None):
        self.base = base
        self.custom_all_gather = all_gather
        self.custom_reduce_scatter = reduce_scatter
        self.direct_min_bytes = base.direct_min_bytes if all_gather is None else None
        self.direct_allows_uneven = base.direct_allows_uneven
        self.has_average = base.has_average

    @property
    def scatter_direct_min_bytes(self) -> int | None:
        return self.base.scatter_direct_min_bytes if self.custom_reduce_scatter is None else None

    def plan_all_gather(self, operands: Sequence[Operand], what: What) -> Collective:
        if self.custom_all_gather is None:
            return self.base.plan_all_gather(operands, what)
        call = partial(_gather, self.custom_all_gather, operands, what.group)
        return PlannedGather(self, operands, call)

    def plan_reduce_scatter(self, bounds: list[Bounds], what: What, dtype: torch.dtype, average: bool) -> Collective:
        """Raises `UnsupportedError` if source and output have different dtypes."""
        if self.custom_reduce_scatter is None:
            return self.base.plan_reduce_scatter(bounds, what, dtype, average)
        if dtype != what.dtype:
            raise UnsupportedError(
                f"a custom reduce-scatter sums in the dtype that travels; got {what.dtype} rows for a sum in {dtype}. "
                "Leave the dtype on the wire unset, or do not set a custom reduce-scatter."
            )
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return PlannedReduction(partial(_scatter, self.custom_reduce_scatter, op, what.group), 1)

    def plan_all_reduce(self, what: What, average: bool) -> Collective:
        return self.base.plan_all_reduce(what, average)


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
