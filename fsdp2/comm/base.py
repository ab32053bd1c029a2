"""The `Comm` interface: how a unit's operands are communicated. Layer: comm.

An *operand* is a flat tensor in which each rank owns one contiguous range: on the direct lane a parameter's rows, in a
packed buffer the rank's segment. An implementation only moves bytes and sums. All ranks of the group start the same
collectives with operands of the same sizes in the same order. For two ranks, with ``|`` between the ranges::

    all_gather       rank 0  [a0 |  .]   ->  [a0 | b1]      in place: a rank's own range is filled before the start
                     rank 1  [ . | b1]   ->  [a0 | b1]
    reduce_scatter   rank 0  [g0 | g1]   ->  [g0 + h0]      on gloo in rank order
                     rank 1  [h0 | h1]   ->  [g1 + h1]

A collective is *planned* once, with everything that does not change, and started in each step. An all-gather always
fills the same tensors; a reduction gets new ones each time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fsdp2.events import emit
from fsdp2.layout import Lane, ShardLayout, choose_lane

Tensors = Sequence[torch.Tensor]
Bounds = Sequence[int]  # group size + 1 offsets into a flat tensor, in elements: the ranges that the ranks own


def hash_of(*fields: object) -> int:
    """A hash of these fields, equal in all processes. It has 7 bytes: `hash` would reduce a longer one."""
    return int.from_bytes(blake2b(repr(fields).encode(), digest_size=7).digest(), "big")


class Operand(NamedTuple):
    """A flat tensor, and the range of it that each rank owns."""

    full: torch.Tensor
    bounds: Bounds

    def row(self, rank: int) -> torch.Tensor:
        """A view of the range that `rank` owns."""
        return self.full[self.bounds[rank] : self.bounds[rank + 1]]


@dataclass(frozen=True)
class OpInfo:
    """The description of a collective.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``; or a phrase that says what it is for.
        fqn: the unit's FQN; None if it belongs to no unit.
        numel, nbytes, dtype: as in `fsdp2.events.Event`.
        device: the device of the tensors.
    """

    kind: str
    fqn: str | None
    numel: int
    nbytes: int
    dtype: torch.dtype | None
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def tag(self) -> int:
        """Identifies unit, kind and size; equal on all ranks. Backends with tagged messages use it to keep mismatched
        collectives apart."""
        return hash_of(self.kind, self.fqn, self.numel, self.nbytes, str(self.dtype))


class Pending(Protocol):
    """Communication in flight, such as a `Work` of torch."""

    def wait(self) -> Any: ...


class Collective:
    """A collective over one group, planned once and started in each step. It may be started again before the wait.

    Args:
        info: its description.
        call: starts it, without events.
        comm, operands: for an all-gather: the `Comm` that planned it, and the operands that it fills.
    """

    def __init__(
        self, info: OpInfo, call: Callable[..., Pending], comm: "Comm | None" = None, operands: Sequence[Operand] = ()
    ):
        self.info, self.call, self.comm, self.operands = info, call, comm, operands
        kind, fqn = info.kind, info.fqn or ""
        self.event = kind, fqn, info.numel, info.nbytes, info.dtype, info.group.size()
        self.waits, self.done = (f"{kind}_wait", fqn), (f"{kind}_done", fqn)

    def start(self, *tensors: Tensors) -> Any:
        """Returns what `wait` needs. An all-gather takes no arguments. A reduction takes flat sources, which must not
        change until the wait, and an output for each, of the size of this rank's range. For an all-reduce, source and
        output are the same tensor."""
        emit(*self.event)
        return self.call(*tensors)

    def wait(self, started: Any) -> None:
        """Returns when work that the caller enqueues next may read the results: on an accelerator the current stream
        waits, on the CPU the process. Call it once for each start."""
        emit(*self.waits)
        started.wait()
        emit(*self.done)


class Comm(ABC):
    """How operands are communicated on one backend; holds no reference to a group.

    Attributes:
        direct_min_bytes: the smallest shard that is worth a separate operand in an all-gather; None if all must share
            one.
        direct_allows_uneven: whether ranks may own ranges of different sizes.
        has_average: whether the backend's reductions can divide by the group's size. If not, `average` is False.
    """

    direct_min_bytes: int | None = None
    direct_allows_uneven: bool = False
    has_average: bool = False

    def gather_lane(self, layout: ShardLayout, itemsize: int) -> Lane:
        """The lane of a parameter with this layout in an all-gather, at `itemsize` bytes per element."""
        return choose_lane(layout, itemsize, self.direct_min_bytes, self.direct_allows_uneven)

    def scatter_lane(self, layout: ShardLayout, itemsize: int) -> Lane:
        """The lane of its gradient in a reduce-scatter; the same, unless an implementation distinguishes them."""
        return self.gather_lane(layout, itemsize)

    @abstractmethod
    def plan_all_gather(self, operands: Sequence[Operand], info: OpInfo) -> Collective:
        """Fills every operand from all ranks. The caller fills this rank's range before each start."""

    @abstractmethod
    def plan_reduce_scatter(self, bounds: list[Bounds], info: OpInfo, average: bool) -> Collective:
        """Sums each source over the ranks and writes this rank's range, as given by `bounds`, to its output; with
        `average`, divides by the group's size."""

    def plan_all_reduce(self, info: OpInfo, average: bool) -> Collective:
        """Sums a tensor over the ranks in place; with `average`, divides by the group's size."""
        return Collective(info, partial(_all_reduce, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, info.group))


def _all_reduce(op: Any, group: dist.ProcessGroup, sources: Tensors, _outputs: Tensors) -> Any:
    return dist.all_reduce(sources[0], op, group, async_op=True)


# Called with each collective that a unit has planned. The collective that they return is used instead.
wrap_collective: list[Callable[[Collective], Collective]] = []


def wrapped(collective: Collective) -> Collective:
    """`collective`, wrapped by all of `wrap_collective`."""
    for wrap in wrap_collective:
        collective = wrap(collective)
    return collective
