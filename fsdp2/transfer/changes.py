"""Bitwise changes since a snapshot: found on the shards, sent as positions and values. Layer: transfer.

On 2 ranks, for a weight of 4 rows of 3 of which rank 0 holds two::

    snapshot  rank 0  [[1 2 3] [4 5 6]]      now  [[1 2 9] [4 5 6]]     1 change, at position 2 of the whole
              rank 1  [[7 8 9] [0 1 2]]           [[7 8 9] [0 1 7]]     1 change, at position 11
    change    indices [2 11], values [9 7]

One collective exchanges the number of changes of each tensor on each rank. Each further one carries the changes of
several tensors, about `BYTES` in total.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from fsdp2.errors import ArgumentError
from fsdp2.layout import strides
from fsdp2.transfer.buckets import view_of
from fsdp2.transfer.items import Item
from fsdp2.transfer.local import Local
from fsdp2.transfer.route import Route, aligned

BYTES = 64 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Found = tuple[torch.Tensor, torch.Tensor]  # positions in the whole tensor, and values


class Snapshot:
    """The shards of a rank at some time, in the dtypes in which they are sent. `nbytes`: the memory that it takes."""

    def __init__(self, values: list[torch.Tensor]):
        self.values = values

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(each.nbytes for each in self.values)


class Change(NamedTuple):
    """The changes of one tensor. `indices`: ascending row-major positions in the whole tensor of `shape`."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]


@torch.no_grad()
def changes_since(items: Sequence[Item], local: Local, since: Snapshot, route: Route) -> Iterator[Change]:
    """See `Weights.changes`."""
    if len(since.values) != sum(len(item.pieces) for item in items):
        raise ArgumentError("changes: the snapshot is of another plan or another model")
    known = iter(since.values)
    own: list[Found] = []
    for index, item in enumerate(items):
        gives = [piece for rank, piece, _ in item.sent(route.ranks) if not item.is_cut or rank == route.me]
        found = [_none(item, route)]
        for number in range(len(item.pieces)):
            new, old = local(index, number), next(known)
            if old.shape != new.shape:
                raise ArgumentError(f"changes: the snapshot has another shape of '{item.meta.name}'; make a new one")
            if number in gives:
                found.append(_changed(item, number, new, old, route))
            old.copy_(new)
        own.append((torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])))
    counts = _all_counts([where.numel() for where, _ in own], route)
    start = 0
    while start < len(items):
        end, total = start, 0
        while end < len(items) and (end == start or total + _nbytes(items[end], counts, end) <= BYTES):
            total += _nbytes(items[end], counts, end)
            end += 1
        yield from _exchanged(items, own, counts, range(start, end), route)
        start = end


def _none(item: Item, route: Route) -> Found:
    nothing = torch.empty(0, dtype=item.meta.dtype, device=route.device)
    return nothing.to(_index_dtype(item)), nothing


def _changed(item: Item, number: int, new: torch.Tensor, old: torch.Tensor, route: Route) -> Found:
    """The changes of this rank's part of a piece."""
    new = new.contiguous()
    where = (_words(new) != _words(old.contiguous())).any(1).nonzero().view(-1)
    values = new.view(-1)[where].to(route.device)
    piece = item.pieces[number]
    box = piece.outside(piece.tiling.box_of(route.ranks[route.me]))
    assert box is not None
    places = torch.zeros_like(where)
    for size, first, step in zip(
        reversed(box.shape), reversed(box.start), reversed(strides(item.meta.shape)), strict=True
    ):
        places += (where % size + first) * step
        where = where // size
    return places.to(route.device, _index_dtype(item)), values


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, one row per element."""
    flat = tensor.view(-1)
    return flat.view(_WORDS.get(flat.itemsize, torch.int64)).view(flat.numel(), -1)


def _index_dtype(item: Item) -> torch.dtype:
    return torch.int32 if prod(item.meta.shape) <= 2**31 else torch.int64


def _all_counts(own: list[int], route: Route) -> list[list[int]]:
    """The number of changes of each tensor on each rank."""
    if route.group is None:
        return [own]
    flight = route.flight([8 * len(own)] * len(route.ranks))
    flight.own.view(torch.int64).copy_(torch.tensor(own))
    flight.start().wait("weights: the numbers of changes")
    counts: list[list[int]] = torch.stack([row.view(torch.int64) for row in flight.rows]).tolist()
    return counts


def _nbytes(item: Item, counts: list[list[int]], index: int) -> int:
    return sum(each[index] for each in counts) * (_index_dtype(item).itemsize + item.meta.dtype.itemsize)


def _exchanged(
    items: Sequence[Item], own: Sequence[Found], counts: list[list[int]], indices: range, route: Route
) -> Iterator[Change]:
    """The changes of these tensors on all ranks."""
    cut = [index for index in indices if items[index].is_cut]
    places: list[dict[int, tuple[int, int]]] = []  # of each rank: where positions and values of a tensor begin
    sizes = []
    for count in counts:
        at, end = {}, 0
        for index in cut:
            values = aligned(end + count[index] * _index_dtype(items[index]).itemsize)
            at[index] = end, values
            end = aligned(values + count[index] * items[index].meta.dtype.itemsize)
        places.append(at)
        sizes.append(end)
    rows: list[torch.Tensor] = []
    if route.group is not None and any(sizes):
        flight = route.flight(sizes)
        for index in cut:
            for tensor, start in zip(own[index], places[route.me][index], strict=True):
                view_of(flight.own, start, tensor.dtype, tensor.shape).copy_(tensor)
        flight.start().wait(
            f"weights: the changes of '{items[indices[0]].meta.name}' to '{items[indices[-1]].meta.name}'"
        )
        rows = flight.rows
    for index in indices:
        name, dtype, shape = items[index].meta
        found = [own[index]]
        if index in cut and rows:
            found = [
                (
                    view_of(row, at[index][0], _index_dtype(items[index]), (count[index],)),
                    view_of(row, at[index][1], dtype, (count[index],)),
                )
                for row, at, count in zip(rows, places, counts, strict=True)
                if count[index]
            ]
        if found:
            positions = torch.cat([each for each, _ in found])
            order = positions.argsort()
            if order.numel():
                yield Change(name, positions[order], torch.cat([each for _, each in found])[order], shape)
