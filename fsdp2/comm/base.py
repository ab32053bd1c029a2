"""The `Comm` protocol: how a unit's operands are communicated. Layer: comm.

A unit passes *operands*: flat tensors in which each rank owns one contiguous range. The runtime defines what a range
means (a parameter's rows on the direct lane, one rank's segment of a packed buffer), so an implementation only moves
bytes and sums. Every rank of the group calls the same methods with operands of the same sizes in the same order.
Picture for two ranks, ``|`` between the ranges::

    all_gather       rank 0  [a0 |  .]   ->  [a0 | b1]      in place: a rank's own range is filled before the call
                     rank 1  [ . | b1]   ->  [a0 | b1]
    reduce_scatter   rank 0  [g0 | g1]   ->  [g0 + h0]      sums run in rank order
                     rank 1  [h0 | h1]   ->  [g1 + h1]

A reduce-scatter's sources may have a narrower dtype than its outputs. Then the rows are sent in that dtype, and summed
and divided in the outputs' dtype: half the bytes on the wire, and only the rows are rounded. See `comm.wire`.

Methods return a `Pending`; the result may be read after its `wait`. On an accelerator `wait` only makes the current
stream wait, on the CPU it blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp2.layout import Lane, ShardLayout, choose_lane


class Operand:
    """A flat tensor and the ranges of it that the ranks own.

    Attributes:
        full: 1-D tensor.
        bounds: ``group size + 1`` offsets into `full`, in elements.
        mark: what it is: the same number on all ranks, and another one for another unit, operation or size. Where
            messages can carry it, those with different marks do not meet. 0: nothing is known.
    """

    def __init__(self, full: torch.Tensor, bounds: Sequence[int], mark: int = 0):
        self.full = full
        self.bounds = bounds
        self.mark = mark
        self._row: tuple[int, torch.Tensor] | None = None

    def row(self, rank: int) -> torch.Tensor:
        """A view of the range that `rank` owns."""
        if self._row is None or self._row[0] != rank:
            start, end = self.bounds[rank], self.bounds[rank + 1]
            self._row = rank, self.full[start:end]
        return self._row[1]

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        """`row` of every rank, computed once."""
        return list(torch.split(self.full, [end - start for start, end in pairwise(self.bounds)]))


@dataclass(frozen=True)
class Scatter:
    """One operand of a reduce-scatter: `source` is summed over ranks, this rank's range goes to `output`.

    Attributes:
        source: in the dtype that is sent.
        output: 1-D, of this rank's range's size; the sum runs in its dtype, which may be wider (bf16 rows, fp32 sums).
    """

    source: Operand
    output: torch.Tensor


class Pending(Protocol):
    """Communication in flight."""

    def wait(self) -> None:
        """Return when work that the caller enqueues next may read the results. Call it once."""


class Works:
    """A `Pending` that waits for torch's work handles and then completes the results locally.

    Args:
        outputs: tensors to divide by `divisor` after the wait, where the backend does not divide.
    """

    def __init__(self, works: Sequence[dist.Work], outputs: Sequence[torch.Tensor] = (), divisor: int = 1):
        self.works = works
        self.outputs = outputs
        self.divisor = divisor

    def wait(self) -> None:
        """See `Pending`."""
        for work in self.works:
            work.wait()
        self.complete()
        if self.divisor != 1:
            for output in self.outputs:
                output.div_(self.divisor)

    def complete(self) -> None:
        """Process the received data; implementations override it."""


class Comm(ABC):
    """How operands travel within one kind of process group; holds no reference to a group.

    Attributes:
        direct_min_bytes: the smallest shard for which a separate operand in an all-gather is worthwhile; None if all
            must share one.
        direct_allows_uneven: whether ranks may own ranges of different sizes.
        has_average: whether the backend divides by the group's size itself.
    """

    direct_min_bytes: int | None = None
    direct_allows_uneven: bool = False
    has_average: bool = False

    @property
    def scatter_direct_min_bytes(self) -> int | None:
        """`direct_min_bytes` for reduce-scatters; the same, unless an implementation distinguishes them."""
        return self.direct_min_bytes

    def gather_lane(self, layout: ShardLayout, itemsize: int) -> Lane:
        """The lane of a parameter with this layout in an all-gather, at `itemsize` bytes per element."""
        return choose_lane(layout, itemsize, self.direct_min_bytes, self.direct_allows_uneven)

    def scatter_lane(self, layout: ShardLayout, itemsize: int) -> Lane:
        """The lane of its gradient in a reduce-scatter."""
        return choose_lane(layout, itemsize, self.scatter_direct_min_bytes, self.direct_allows_uneven)

    def release(self) -> None:  # noqa: B027 - most keep nothing
        """Free the memory that is kept for later calls."""

    @abstractmethod
    def all_gather(self, operands: Sequence[Operand], group: dist.ProcessGroup) -> Pending:
        """Fill every operand from all ranks; the caller has filled its own range."""

    @abstractmethod
    def reduce_scatter(self, scatters: Sequence[Scatter], group: dist.ProcessGroup, average: bool) -> Pending:
        """Sum every source over the ranks and write this rank's range to its output; with `average`, divide by the
        group's size. Sources must not be changed until the wait.

        All scatters of a call have the same source dtype and the same output dtype.
        """

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, average: bool, mark: int = 0) -> Pending:
        """Sum `tensor` over the ranks in place; with `average`, divide by the group's size. `mark`: see `Operand`."""
        native = average and self.has_average
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG if native else dist.ReduceOp.SUM, group, async_op=True)
        assert work is not None
        return Works([work], [tensor], group.size() if average and not native else 1)
