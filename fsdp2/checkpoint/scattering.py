"""Load from files that only one rank can see: it reads them and broadcasts them in parts. Layer: checkpoint.

This is the only way to load that communicates. If all ranks see the files, `load` is faster, because ranks do not wait
for each other.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.loading import Loaded, check_twins, requests_for
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.ranks.agreement import world_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.run.replacing import READS, not_replaced
from fsdp2.checkpoint.state.sources import Sources
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import ArgumentError, CheckpointError, ReplacedError
from fsdp2.placement.box import Box, whole

__all__ = ["load_from_rank"]

CHUNK_BYTES = 16 << 20  # per message: what the reader holds besides its own shards


def load_from_rank(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, Any],
    rank: int = 0,
    sources: Sources | None = None,
    strict: bool = True,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a model from a folder that only one rank can see. Every rank of the group must call this with the same
    model. One rank reads the tensors and broadcasts them, in messages of at most 16 MiB, of which each rank keeps its
    part. No rank ever holds a whole tensor.

    Args:
        folder: as for `load`; only the path on rank `rank` is used.
        model: as for `load`.
        rank: the rank that reads, counted within the group.
        sources: as for `load`.
        strict: as for `load`.
        cast: as for `load`.
        process_group: None for all ranks.

    Raises:
        MismatchError: as for `load`; on all ranks. (If a weight that is tied here is stored twice with different
            values, the other ranks raise a `CheckpointError`.)
        ReplacedError: as for `load`; on all ranks.
        CheckpointError: on the other ranks, if the reader failed, with its error in the message (the reader raises the
            error itself); the model may be partly filled. Or the ranks request different tensors.
        ArgumentError: the group has no such rank.

    Example::

        fsdp2.checkpoint.load_from_rank("/scratch/only/here/llama", model=model)
    """
    world = world_of(process_group)
    if not 0 <= rank < world.size:
        raise ArgumentError(f"load_from_rank: rank={rank}: expected a rank of the group, 0 to {world.size - 1}")
    for reads_left in reversed(range(READS)):
        ranks, files = _Ranks(world, process_group, rank), None
        try:
            files = ranks.reader_does(partial(_Files, folder))
            listed = ranks.told(ranks.reader_does(partial(_listing, files)))
            matching = Matching(listed, world, cast, sources)
            ranks.match(matching, model, strict)
            ranks.all_do(partial(files.compare, matching.twins) if files is not None else _nothing)
            ranks.all_do(partial(matching.allocate, model, None))
            ranks.all_do(ranks.make_room)
            _transfer(ranks, files, matching.needs)
            matching.finish()
            return Loaded(listed.path, listed.step, {}, matching.missing, matching.unexpected)
        except ReplacedError:  # on all ranks, so that all start again
            if not reads_left:
                raise
        finally:
            if files is not None:
                files.catalog.close()
    raise AssertionError("unreachable")


def _transfer(ranks: "_Ranks", files: "_Files | None", needs: Sequence[Need]) -> None:
    """Send all tensors to all ranks, part by part; each rank keeps what is in its box. A rank that cannot keep what it
    gets goes on, and says so at the end, so that no rank waits for it, nor considers a model loaded that it has not."""
    errors: list[Exception] = []
    for need in needs:
        entry, dtype = need.entry, need.entry.local.dtype
        for part in _parts(whole(entry.tiling.shape), dtype.itemsize) if prod(entry.tiling.shape) else ():
            read = partial(files.read, need, part) if files is not None else None
            values = ranks.broadcast(part, dtype, read)
            common = part.intersect(entry.box)
            if common is not None:
                try:
                    own = entry.local[common.within(entry.box).slices()]
                    own.copy_(values[common.within(part).slices()])
                except Exception as error:
                    errors.append(error)
    ranks.all_do(partial(_raise, errors))


def _raise(errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    """The box in parts that each fit into a message."""
    return box.split_until(lambda part: part.numel * itemsize <= CHUNK_BYTES)


class _Files:
    """The files that the reader reads.

    Raises:
        CheckpointError: as `open_catalog`.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._storage, self._path = storage_of(folder)
        self.catalog: Catalog = open_catalog(self._storage, self._path)

    def read(self, need: Need, part: Box, into: torch.Tensor) -> None:
        """A part of a tensor that some rank needs."""
        with not_replaced(self._storage, self._path, self.catalog):
            self.catalog.read(requests_for(self.catalog, need, part, into), num_threads=0)

    def compare(self, twins: Iterable[tuple[Need, Need]]) -> None:
        """Check that weights that are tied here have the same values under both names; `MismatchError` if not."""
        for one, other in twins:
            entry = one.entry
            for part in _parts(whole(entry.tiling.shape), entry.local.element_size()):
                values = torch.empty((2, *part.shape), dtype=entry.local.dtype)
                self.read(one, part, values[0])
                self.read(other, part, values[1])
                check_twins(self.catalog, (one, other), *values)


class _Ranks:
    """What the ranks do together. An error of one rank stops all of them: with its type on that rank, and as a
    `CheckpointError` with its text on the others.

    Args:
        reader: rank within the group.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, reader: int):
        self._reads = world.rank == reader
        self._world, self._group, self._reader = world, group, reader
        nccl = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def make_room(self) -> None:
        """Allocate what every message fits into."""
        self._buffer = torch.empty(CHUNK_BYTES + 1, dtype=torch.uint8, device=self._device)

    def all_do(self, step: Callable[[], Any]) -> Any:
        """Let every rank do `step`. Returns what it was on this one."""
        error: BaseException | None = None
        try:
            own = step()
        except BaseException as caught:
            error = caught
        whys = self._gathered("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if why := whys[self._reader]:
            kind = ReplacedError if why.startswith(f"{ReplacedError.__name__}: ") else CheckpointError
            raise kind(f"load_from_rank: rank {self._reader}, which reads, gave up: {why}")
        if failed := [rank for rank, why in enumerate(whys) if why]:
            raise CheckpointError(f"load_from_rank: ranks {failed} failed; see their errors ({whys[failed[0]]})")
        return own

    def reader_does(self, step: Callable[[], Any]) -> Any:
        """Let the reader do `step`. Returns what it was; None on the other ranks."""
        return self.all_do(step if self._reads else _nothing)

    def told(self, own: Any) -> Any:
        """What the reader has."""
        told = [own]
        if self._world.size > 1:
            dist.broadcast_object_list(told, group=self._group, group_src=self._reader)
        return told[0]

    def match(self, matching: Matching, model: nn.Module | Mapping[str, Any], strict: bool) -> None:
        """Match on all ranks, and compare what they ask for."""
        self.all_do(partial(matching.match, model, None, strict))
        asked = [(need.entry.name, need.entry.tiling, need.entry.local.dtype) for need in matching.needs]
        marks = self._gathered(zlib.crc32(repr(asked).encode(errors="backslashreplace")))
        different = [rank for rank, mark in enumerate(marks) if mark != marks[self._reader]]
        if different:
            raise CheckpointError(
                f"load_from_rank: ranks {different} ask for other tensors, or other parts, than rank {self._reader}: "
                "all must give the same model, sharded over the same mesh"
            )

    def broadcast(self, part: Box, dtype: torch.dtype, read: Callable[[torch.Tensor], None] | None) -> torch.Tensor:
        """A part of a tensor, which the reader reads. The next call overwrites it. A byte behind the values says
        whether the reader failed."""
        message = self._buffer[: part.numel * dtype.itemsize + 1]
        values = message[:-1].view(dtype).view(part.shape)
        errors: list[BaseException] = []
        if read is not None:
            try:
                read(values)
            except BaseException as error:
                errors.append(error)
            message[-1] = bool(errors)
        if self._world.size > 1:
            dist.broadcast(message, group=self._group, group_src=self._reader)
        if message[-1]:
            self.all_do(partial(_raise, errors))
        return values

    def _gathered(self, own: Any) -> list[Any]:
        every = [own] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(every, own, group=self._group)
        return every


def _nothing() -> None:
    """What the other ranks do while the reader does something."""


def _listing(files: _Files) -> Catalog:
    """The files' model without the places of its tensors, for the ranks that cannot see them."""
    catalog = files.catalog
    parts: list[Any] = [
        {"model": each.get("model", empty)}
        for each, empty in ((catalog.tensors, {}), (catalog.aliases, {}), (catalog.values, ()), (catalog.left_out, {}))
    ]
    return Catalog(LocalStorage(), catalog.path, catalog.kind, catalog.step, *parts)
