"""Load from files that only one rank can see: it reads them and broadcasts them in parts. Layer: checkpoint.

This is the only way to load that communicates. If all ranks see the files, `load` is faster, because ranks do not wait
for each other.
"""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.loading import Loaded, check_twins
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.opening import not_replaced, open_catalog
from fsdp2.checkpoint.ranks.agreement import world_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.run.folders import TRIES
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
    ranks = _Ranks(world, process_group, rank)
    for reads_left in reversed(range(TRIES)):
        catalogs: list[Catalog] = []
        try:
            return _load(ranks, folder, model, Matching(_NOTHING, world, cast, sources), strict, catalogs)
        except ReplacedError:  # on all ranks, so that all start again
            if not reads_left:
                raise
        finally:
            for catalog in catalogs:
                catalog.close()
    raise AssertionError("unreachable")


def _load(
    ranks: "_Ranks",
    folder: str | os.PathLike[str],
    model: nn.Module | Mapping[str, Any],
    matching: Matching,
    strict: bool,
    catalogs: list[Catalog],
) -> Loaded:
    """Load on all ranks. The reader's catalog is added to `catalogs`."""
    listed: list[Any] = [None]
    with ranks.together():
        if ranks.is_reader:
            catalogs.append(open_catalog(*storage_of(folder)))
            listed = [_listing(catalogs[0])]
    if ranks.world.size > 1:
        dist.broadcast_object_list(listed, group=ranks.group, group_src=ranks.reader)
    matching.catalog = listed[0]
    with ranks.together():
        matching.match(model, None, strict)
    ranks.compare(matching.needs)
    room = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    with ranks.together():
        for one, other in matching.twins if ranks.is_reader else ():
            local = one.entry.local
            for part in _chunks(whole(one.entry.tiling.shape), 2 * local.element_size()):
                values = torch.empty((2, *part.shape), dtype=local.dtype)
                with not_replaced(*storage_of(folder), catalogs[0]):
                    check_twins(catalogs[0], one, other, part, values)
        matching.allocate(model, None)
        room = room.to(ranks.device)
    errors: list[Exception] = []
    for need in matching.needs:
        local, box = need.entry.local, need.entry.box
        for part in _chunks(whole(need.entry.tiling.shape), local.element_size()):
            message = room[: part.numel * local.element_size()]
            values = message.view(local.dtype).view(part.shape)
            if ranks.is_reader and not errors:
                try:
                    with not_replaced(*storage_of(folder), catalogs[0]):
                        catalogs[0].read(need.parts(catalogs[0], part, values), num_threads=0)
                except Exception as error:
                    errors.append(error)
            if ranks.world.size > 1:
                dist.broadcast(message, group=ranks.group, group_src=ranks.reader)
            common = part.intersect(box)
            if common is not None and not errors:
                try:
                    local[common.within(box).slices()].copy_(values[common.within(part).slices()])
                except Exception as error:  # it goes on, so that no rank waits for it, and says so at the end
                    errors.append(error)
    with ranks.together():
        if errors:
            raise errors[0]
        matching.finish()
    return Loaded(matching.catalog.path, matching.catalog.step, {}, matching.missing, matching.unexpected)


_NOTHING = Catalog(LocalStorage(), "", "")


def _chunks(box: Box, itemsize: int) -> Iterator[Box]:
    """The box in parts that each fit into a message."""
    return box.split_until(lambda part: part.numel * itemsize <= CHUNK_BYTES) if box.numel else iter(())


def _listing(catalog: Catalog) -> Catalog:
    """The files' model without the places of its tensors, for the ranks that cannot see them."""
    listed = Catalog(LocalStorage(), catalog.path, catalog.kind, catalog.step)
    listed.tensors = {"model": catalog.tensors.get("model", {})}
    listed.aliases = {"model": catalog.aliases.get("model", {})}
    listed.left_out = {"model": catalog.left_out.get("model", {})}
    listed.known_values = {"model": catalog.values_of("model")}
    return listed


class _Ranks:
    """The ranks that load, and how an error of one of them stops all.

    Args:
        reader: rank within the group.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, reader: int):
        self.world, self.group, self.reader = world, group, reader
        self.is_reader = world.rank == reader
        nccl = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error within is raised on all ranks: with its type on that one, as a `CheckpointError` on the others."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        whys = self._gathered("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if why := whys[self.reader]:
            kind = ReplacedError if why.startswith(f"{ReplacedError.__name__}: ") else CheckpointError
            raise kind(f"load_from_rank: rank {self.reader}, which reads, gave up: {why}")
        if failed := [rank for rank, why in enumerate(whys) if why]:
            raise CheckpointError(f"load_from_rank: ranks {failed} failed; see their errors ({whys[failed[0]]})")

    def compare(self, needs: Sequence[Need]) -> None:
        """Check that all ranks ask for the same."""
        asked = [(need.entry.name, need.entry.tiling, need.entry.local.dtype) for need in needs]
        marks = self._gathered(zlib.crc32(repr(asked).encode(errors="backslashreplace")))
        different = [rank for rank, mark in enumerate(marks) if mark != marks[self.reader]]
        if different:
            raise CheckpointError(
                f"load_from_rank: ranks {different} ask for other tensors, or other parts, than rank {self.reader}: "
                "all must give the same model, sharded over the same mesh"
            )

    def _gathered(self, own: Any) -> list[Any]:
        every = [own] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(every, own, group=self.group)
        return every
