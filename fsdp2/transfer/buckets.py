"""`Pass`: whole tensors in buckets, gathered directly from the shards. Layer: transfer.

On 2 ranks, a bucket with a weight ``[w0|w1]``, a bias ``[b0|b1]`` and a buffer ``s`` that all ranks have::

    sent      rank 0  [head w0 b0]        rank 1  [head w1 b1]      cast to the dtype of the wire
    received  [head w0 b0 | head w1 b1]                             one collective
    bucket    [w0 w1 | b0 b1 | s]                                   one flat buffer, tensors at aligned offsets

The head contains the numbers of pass and bucket, and whether the rank leaves the pass. A rank that leaves sends only
heads, as often as others have requested its parts, so that they get an error instead of waiting forever.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from fsdp2._torch import foreach_copy
from fsdp2.errors import OrderError
from fsdp2.placement.box import Box
from fsdp2.transfer.items import Item
from fsdp2.transfer.local import Local
from fsdp2.transfer.route import Flight, Route, aligned

MIN_PART = 1 << 12  # elements of a part of a large tensor; limits the number of collectives with tiny buckets
HEAD = 32  # four int64: pass, bucket, whether the rank leaves, and one unused


class Placed(NamedTuple):
    """A tensor's place in a bucket. `offset`: in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Bucket:
    """Several whole tensors in one flat buffer. Valid until the next bucket is requested.

    Attributes:
        flat: the buffer, 1-D, bytes; empty on ranks that receive nothing (`to="first"`).
        tensors: (name, dtype, shape, offset in bytes) of each.
    """

    def __init__(self, flat: torch.Tensor, tensors: tuple[Placed, ...]):
        self.flat = flat
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs, views of the buffer."""
        if self.flat.numel() or not any(map(_nbytes, self.tensors)):
            for each in self.tensors:
                yield each.name, view_of(self.flat, each.offset, each.dtype, each.shape)


def _nbytes(placed: Placed) -> int:
    return torch.Size(placed.shape).numel() * placed.dtype.itemsize


def view_of(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the bytes from `offset`."""
    numel = torch.Size(shape).numel()
    return flat[offset : offset + numel * dtype.itemsize].view(dtype).view(tuple(shape))


class _Part(NamedTuple):
    """A part of an item that a rank sends: `box` in the published tensor, within `own`, the rank's part of the piece.

    Attributes:
        number, piece: the index of the item, and of its piece.
        at: where it begins in the bytes that the rank sends.
    """

    number: int
    piece: int
    own: Box
    box: Box
    at: int


class _Plan(NamedTuple):
    """A bucket to send, or a part of a bucket that has a single, larger tensor.

    Attributes:
        indices: the indices of its items.
        parts: the parts of each rank.
        sizes: the bytes that each rank sends; empty if none does.
        is_last: whether it is the last part of its bucket.
    """

    number: int
    indices: range
    tensors: tuple[Placed, ...]
    nbytes: int
    parts: list[list[_Part]]
    sizes: list[int]
    is_last: bool = True


def plan_buckets(items: Sequence[Item], ranks: tuple[int, ...], bucket_bytes: int) -> Iterator[_Plan]:
    """The plans of all buckets; the same on all ranks."""
    number, start, total = 0, 0, 0
    for index, item in enumerate((*items, None)):
        if index > start and (item is None or total + item.nbytes > bucket_bytes):
            yield from _plans(number, items, range(start, index), ranks, bucket_bytes)
            number, start, total = number + 1, index, 0
        total += 0 if item is None else item.nbytes


def _plans(
    number: int, items: Sequence[Item], indices: range, ranks: tuple[int, ...], bucket_bytes: int
) -> Iterator[_Plan]:
    """One plan, or several whose parts have at most `bucket_bytes` together."""
    tensors, end = [], 0
    trips: list[tuple[list[list[_Part]], list[int]]] = []
    for index in indices:
        item = items[index]
        itemsize, is_large = item.meta.dtype.itemsize, item.nbytes > bucket_bytes
        tensors.append(Placed(*item.meta, end))
        end += aligned(item.nbytes)
        sent = [0] * len(ranks)
        for rank, piece, own in item.sent(ranks) if item.is_cut and len(ranks) > 1 else ():
            at_most = max(bucket_bytes // len(ranks) // itemsize, MIN_PART) if is_large else own.numel
            for box in own.split_until(lambda box, at_most=at_most: box.numel <= at_most):  # type: ignore[misc]
                if sent[rank] == len(trips):
                    trips.append(([[] for _ in ranks], [HEAD] * len(ranks)))
                parts, sizes = trips[sent[rank]]
                parts[rank].append(_Part(index, piece, own, box, sizes[rank]))
                sizes[rank] += aligned(box.numel * itemsize)
                sent[rank] += is_large
    if not trips:
        trips.append(([[] for _ in ranks], []))
    for trip, (parts, sizes) in enumerate(trips):
        yield _Plan(number, indices, tuple(tensors), end, parts, sizes, trip == len(trips) - 1)


class Pass:
    """One pass over the tensors.

    Args:
        local: what this rank holds.
        version: the number of the pass.

    Attributes:
        checksum: the checksum of everything that has arrived.
    """

    def __init__(self, items: Sequence[Item], local: Local, route: Route, version: int):
        self.checksum = 0
        self._items = items
        self._local = local
        self._route = route
        self._version = version

    def buckets(
        self, bucket_bytes: int, lookahead: int, first_only: bool, device: torch.device | str | None
    ) -> Iterator[Bucket]:
        """See `Weights.full`."""
        plans = [*plan_buckets(self._items, self._route.ranks, bucket_bytes)]
        if first_only and not self._route.has_first:
            plans = [plan._replace(sizes=[]) for plan in plans]
        todo = iter([plan for plan in plans if plan.sizes])
        flights: deque[_Sent] = deque()
        is_here = not first_only or (self._route.me == 0 and self._route.has_first)
        nbytes = max((plan.nbytes for plan in plans), default=0) if is_here else 0
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=self._route.device)  # zeros between tensors too
        is_over = False
        try:
            for plan in plans:
                self._send(flights, islice(todo, lookahead - len(flights)), first_only)
                here = flat[: plan.nbytes]
                if is_here:
                    self._copy_own(plan, here)
                if plan.sizes:
                    self._arrive(flights.popleft(), here)
                    self._send(flights, islice(todo, lookahead - len(flights)), first_only)
                if not plan.is_last:
                    continue
                if is_here:
                    self.checksum = _checksum(here, self.checksum)
                yield Bucket(here if device is None else here.to(device), plan.tensors)
            is_over = True
        except _Left as left:
            is_over = True
            self._end(flights, todo if first_only else iter(()), first_only)
            raise OrderError(str(left)) from None
        finally:
            if not is_over:  # this rank's consumer has raised or stopped
                self._end(flights, todo if first_only else islice(todo, lookahead), first_only)

    def _send(self, flights: "deque[_Sent]", plans: Iterable[_Plan], first_only: bool) -> None:
        for plan in plans:
            flights.append(_Sent(plan, self._start(plan, first_only)))

    @torch.no_grad()
    def _start(self, plan: _Plan, first_only: bool, leaves: bool = False) -> Flight:
        """Start to send this rank's parts of a bucket, and to receive those of the others."""
        flight = self._route.flight(plan.sizes, first_only)
        flight.own[:HEAD].view(torch.int64).copy_(torch.tensor([self._version, plan.number, leaves, 0]))
        destinations, sources = [], []
        for part in () if leaves else plan.parts[self._route.me]:
            destinations.append(view_of(flight.own, part.at, self._items[part.number].meta.dtype, part.box.shape))
            sources.append(self._local(part.number, part.piece, part.box.within(part.own).slices()))
        foreach_copy(destinations, sources)
        return flight.start()

    @torch.no_grad()
    def _arrive(self, sent: "_Sent", flat: torch.Tensor) -> None:
        """Wait for a bucket, and assemble its tensors."""
        plan, flight = sent
        flight.wait(f"weights: bucket {plan.number} ('{plan.tensors[0].name}' to '{plan.tensors[-1].name}')")
        if not flight.rows:
            return
        self._check(plan, torch.stack([row[:HEAD].view(torch.int64) for row in flight.rows]).tolist())
        destinations, sources = [], []
        for row, parts in zip(flight.rows, plan.parts, strict=True):
            for part in parts:
                placed = plan.tensors[part.number - plan.indices.start]
                destinations.append(view_of(flat, placed.offset, placed.dtype, placed.shape)[part.box.slices()])
                sources.append(view_of(row, part.at, placed.dtype, part.box.shape))
        foreach_copy(destinations, sources)

    def _check(self, plan: _Plan, heads: list[list[int]]) -> None:
        for rank, (version, number, leaves, _) in zip(self._route.ranks, heads, strict=True):
            if leaves:
                raise _Left(
                    f"weights: rank {rank} has left pass {version} before bucket {plan.number} "
                    f"('{plan.tensors[0].name}'). Every rank must iterate to the end; did its consumer raise?"
                )
            if (version, number) != (self._version, plan.number):
                raise OrderError(
                    f"weights: rank {rank} is in bucket {number} of pass {version}, this one in bucket {plan.number} "
                    f"of pass {self._version}. All ranks must make the same passes of the same plan."
                )

    @torch.no_grad()
    def _copy_own(self, plan: _Plan, flat: torch.Tensor) -> None:
        """Copy the tensors that this rank has whole."""
        destinations, sources = [], []
        for index, placed in zip(plan.indices, plan.tensors, strict=True):
            item = self._items[index]
            if len(self._route.ranks) == 1 or not item.is_cut:
                whole = view_of(flat, placed.offset, placed.dtype, placed.shape)
                for _, piece, box in item.sent((self._route.ranks[self._route.me],)):
                    destinations.append(whole[box.slices()])
                    sources.append(self._local(index, piece))
        foreach_copy(destinations, sources)

    def _end(self, flights: "deque[_Sent]", to_leave: Iterable[_Plan], first_only: bool) -> None:
        """Wait for what is in flight, and send heads in the buckets for which other ranks will wait."""
        for sent in flights:
            sent.flight.wait("weights: the end of a pass that was left")
        for plan in to_leave:
            self._start(plan, first_only, leaves=True).wait("weights: the end of a pass that was left")


class _Sent(NamedTuple):
    plan: _Plan
    flight: Flight


class _Left(Exception):
    """Another rank has left the pass."""


def _checksum(flat: torch.Tensor, before: int) -> int:
    """The checksum after one more bucket: each word is weighted by its position."""
    found = torch.tensor(before, device=flat.device)
    for part in flat[: flat.numel() // 8 * 8].view(torch.int64).split(1 << 15):
        places = torch.arange(1, 2 * part.numel(), 2, device=flat.device)
        found = found * 31 + places.mul_(part).sum()  # modulo 2**64
    return int(found.item())
