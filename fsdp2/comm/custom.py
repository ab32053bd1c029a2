"""The two interfaces of custom collectives, `AllGather` and `ReduceScatter`. Layer: comm.

They are those of torch's FSDP2 (`torch.distributed.fsdp`'s ``set_custom_all_gather`` and
``set_custom_reduce_scatter``), so that an object written for one library works with the other; only the methods matter,
and no subclass is required. `fsdp2.extras.custom_comm` calls them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist


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
        """Return a contiguous 1-D tensor of `size` with any content: the output of the next call. It is dropped when
        it has been copied out; an implementation that reuses it must not return it again before that."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor`, ``[ranks * n]``, with the `input_tensor`, ``[n]``, of every rank in rank order; this
        rank's is its slice of the output. `async_op` is True: the call may return before the all-gather is complete.

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
        """Reduce `input_tensor`, ``[ranks * n]``, over the ranks; this rank's n elements go to `output_tensor`. `op` is
        ``ReduceOp.AVG`` to divide by the number of ranks, otherwise ``ReduceOp.SUM``; `async_op` is not passed, as in
        torch's FSDP2. Returns as `AllGather.__call__`."""
