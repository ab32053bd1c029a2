"""Load from files that only one rank can see: it reads them and broadcasts them in parts. Layer: checkpoint.

This is the only kind of load that communicates. If all ranks see the files, `load` is faster, because ranks do not wait
for each other.
"""

import os
import zlib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.loading import Loaded, check_twins
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.opening import not_replaced, open_catalog
from fsdp2.checkpoint.ranks.agreement import world_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.state.sources import Sources
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import ArgumentError, CheckpointError
from fsdp2.placement.box import whole

__all__ = ["load_from_rank"]

CHUNK_BYTES = 16 << 20  # per message; the reader holds one in addition to its own shards


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
        CheckpointError: on the other ranks, if the reader failed, for example because its files were replaced. The
            message contains the reader's error, and the model may be partly filled. Or the ranks request different
            tensors.
        ArgumentError: the group has no such rank.

    Example::

        fsdp2.checkpoint.load_from_rank("/scratch/only/here/llama", model=model)
    """
    world = world_of(process_group)
    if not 0 <= rank < world.size:
        raise ArgumentError(f"load_from_rank: rank={rank}: expected a rank of the group, 0 to {world.size - 1}")
    ranks = _Ranks(world, process_group, rank)
    catalog: Catalog | None = None

    def opened() -> Catalog | None:
        nonlocal catalog
        if world.rank != rank:
            return None
        catalog = open_catalog(*storage_of(folder))
        facts = (catalog.path, catalog.kind, catalog.step, catalog.tensors, catalog.aliases, catalog.left_out)
        return Catalog(LocalStorage(), *facts, values=catalog.values)

    def matched() -> int:
        matching.match(model, None, strict)
        asked = [(need.entry.name, need.entry.tiling, need.entry.local.dtype) for need in matching.needs]
        return zlib.crc32(repr(asked).encode(errors="backslashreplace"))

    def finished() -> None:
        if errors:
            raise errors[0]
        matching.finish()

    errors: list[Exception] = []
    nccl = dist.is_initialized() and dist.get_backend(process_group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    room = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
    try:
        listed = ranks.together(opened)[rank]
        matching = Matching(listed, world, cast, sources)
        marks = ranks.together(matched)
        if different := [each for each, mark in enumerate(marks) if mark != marks[rank]]:
            raise CheckpointError(
                f"load_from_rank: ranks {different} request different tensors, or parts of them, than rank {rank}: "
                "all must pass the same model, sharded over the same mesh"
            )
        ranks.together(lambda: matching.allocate(model, None))
        for need in matching.needs:
            _fill(need, catalog, folder, room, ranks, errors)
        ranks.together(finished)
    finally:
        if catalog is not None:
            catalog.close()
    return Loaded(listed.path, listed.step, {}, matching.missing, matching.unexpected)


def _fill(
    need: Need,
    catalog: Catalog | None,
    folder: str | os.PathLike[str],
    room: torch.Tensor,
    ranks: "_Ranks",
    errors: list[Exception],
) -> None:
    """Read and broadcast a tensor in parts that fit into `room`, and keep this rank's part. Continues after an error,
    so that no rank waits forever."""
    local, shape = need.entry.local, need.entry.tiling.shape
    most = room.numel() // local.element_size()
    for part in whole(shape).split_until(lambda part: part.numel <= most) if prod(shape) else ():
        message = room[: part.numel * local.element_size()]
        values = message.view(local.dtype).view(part.shape)
        try:
            if catalog is not None and not errors:
                with not_replaced(*storage_of(folder), catalog):
                    catalog.read(need.parts(catalog, part, values), num_threads=0)
                    check_twins(catalog, need, part, values)
        except Exception as error:
            errors.append(error)
        if ranks.world.size > 1:
            dist.broadcast(message, group=ranks.group, group_src=ranks.reader)
        try:
            if (common := part.intersect(need.entry.box)) is not None:
                local[common.within(need.entry.box).slices()].copy_(values[common.within(part).slices()])
        except Exception as error:
            errors.append(error)


class _Ranks(NamedTuple):
    """The ranks that load, and the one of them that reads."""

    world: World
    group: dist.ProcessGroup | None
    reader: int

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """The results of `work` on all ranks. An error is raised on all of them: as it is on the rank where it
        occurred, as a `CheckpointError` on the others."""
        own, error = None, None
        try:
            own = work()
        except BaseException as caught:
            error = caught
        every = [(own, "" if error is None else f"{type(error).__name__}: {error}")] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(every, every[0], group=self.group)
        if error is not None:
            raise error
        results, whys = zip(*every, strict=True)
        if why := whys[self.reader]:
            raise CheckpointError(f"load_from_rank: rank {self.reader}, which reads, failed: {why}")
        if failed := [rank for rank, why in enumerate(whys) if why]:
            raise CheckpointError(f"load_from_rank: ranks {failed} failed; see their errors ({whys[failed[0]]})")
        return [*results]
