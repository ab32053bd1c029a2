"""Load from files that only one rank can see: it reads, and sends every rank its part. Layer: checkpoint.

The one way to load here that communicates. Where all ranks see the files, `load` is faster: nobody waits for anybody.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.agreement import world_of
from fsdp2.checkpoint.box import Box
from fsdp2.checkpoint.catalog import Catalog, PieceTable, StoredTensorInfo
from fsdp2.checkpoint.formats.opening import open_catalog
from fsdp2.checkpoint.loading import Loaded, requests_for
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.reading import read_all
from fsdp2.checkpoint.sources import Sources
from fsdp2.checkpoint.state import World
from fsdp2.checkpoint.storage import LocalStorage, storage_of
from fsdp2.errors import CheckpointError

__all__ = ["load_from_rank"]

CHUNK_BYTES = 16 << 20  # of one message: what the reader holds besides its own shards


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
    """Load a model from a folder that one rank can see. Every rank of the group calls this, with the same model; one
    reads each rank's part of each tensor, in messages of at most 16 MiB, and sends it. No rank ever holds a whole
    tensor.

    Args:
        folder: as for `load`; only the path that rank `rank` gives is looked at.
        model: as for `load`.
        rank: who reads, counted within the group.
        sources, strict, cast: as for `load`.
        process_group: None for all ranks.

    Raises:
        MismatchError: as for `load`; on all ranks.
        CheckpointError: the reader failed; its error is in the message. The model may have been filled in part.

    Example::

        fsdp2.checkpoint.load_from_rank("/scratch/only/here/llama", model=model)
    """
    world = world_of(process_group)
    channel = _Channel(world, process_group, rank)
    catalog: Catalog | None = None
    text = b""
    if channel.reads:
        with channel.failing():
            storage, path = storage_of(folder)
            catalog = open_catalog(storage, path)
            text = _listing(catalog)
    listed = _listed(channel.tell(text))
    matching = Matching(listed, world, cast, sources)
    matching.match(model, None, strict)  # the same question and the same answer on all ranks
    for need in matching.needs:
        for receiver in range(world.size):
            box = need.entry.tiling.box_of(receiver)
            if box is not None and box.numel:
                _transfer(channel, catalog, need, receiver, box)
    matching.finish()
    if catalog is not None:
        catalog.close()
    return Loaded(listed.path, listed.step, {}, matching.missing, matching.unexpected)


def _transfer(channel: "_Channel", catalog: Catalog | None, need: Need, receiver: int, box: Box) -> None:
    """One rank's part of one tensor, in parts."""
    own = receiver == channel.world.rank
    if not own and not channel.reads:
        return
    for part in _parts(box, need.entry.local.element_size()):
        place = need.entry.local[part.within(box).slices()] if own and box.shape else need.entry.local
        if channel.reads:
            assert catalog is not None
            values = place if own else torch.empty(part.shape, dtype=need.entry.local.dtype)
            with channel.failing():
                read_all(catalog.storage, requests_for(catalog, need, part, values))
            if not own:
                channel.send(values, receiver)
        else:
            channel.receive(place)


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    """Halves of halves of a box, each of the size of a message or a single element."""
    if box.numel * itemsize <= CHUNK_BYTES or box.numel == 1:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    for start, size in ((0, half), (half, box.shape[dim] - half)):
        begin = (*box.start[:dim], box.start[dim] + start, *box.start[dim + 1 :])
        yield from _parts(Box(begin, (*box.shape[:dim], size, *box.shape[dim + 1 :])), itemsize)


class _Channel:
    """From the reader to the others. Before all that it sends, it says whether it is well, so nobody waits for the
    dead.

    Args:
        reader: rank within the group.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, reader: int):
        self.world = world
        self.reads = world.rank == reader
        self._group = group
        self._reader = reader
        cuda = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within, an error of the reader is told to the others, who are waiting for its next message."""
        try:
            yield
        except BaseException:
            for receiver in self.others():
                self.say(-1, receiver)
            raise

    def tell(self, content: bytes) -> bytes:
        """From the reader to all."""
        data = torch.tensor(list(content), dtype=torch.uint8, device=self._device)
        for receiver in self.others() if self.reads else ():
            self.send(data, receiver, with_size=True)
        if self.reads:
            return content
        data = torch.empty(self._hear(), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=self._reader)
        return bytes(data.tolist())

    def send(self, values: torch.Tensor, receiver: int, with_size: bool = False) -> None:
        """Say that all is well, then send."""
        self.say(values.numel() if with_size else 0, receiver)
        dist.send(values.to(self._device).contiguous(), group=self._group, group_dst=receiver)

    def receive(self, place: torch.Tensor) -> None:
        """Receive into a tensor of any layout and device."""
        self._hear()
        values = torch.empty(place.shape, dtype=place.dtype, device=self._device)
        dist.recv(values, group=self._group, group_src=self._reader)
        place.copy_(values)

    def say(self, state: int, receiver: int) -> None:
        """A number: -1 for a failure."""
        dist.send(torch.tensor([state], device=self._device), group=self._group, group_dst=receiver)

    def others(self) -> Iterable[int]:
        """The ranks that do not read."""
        return (rank for rank in range(self.world.size) if rank != self._reader)

    def _hear(self) -> int:
        state = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(state, group=self._group, group_src=self._reader)
        if state.item() < 0:
            raise CheckpointError(f"load_from_rank: rank {self._reader}, which reads, failed; see its error")
        return int(state.item())


def _listing(catalog: Catalog) -> bytes:
    """What a catalog says of its model, for the ranks that cannot see it."""
    content = {
        "path": catalog.path,
        "step": catalog.step,
        "tensors": {name: [info.dtype, info.shape] for name, info in catalog.tensors.get("model", {}).items()},
        "aliases": dict(catalog.aliases.get("model", {})),
        "values": list(catalog.values.get("model", ())),
    }
    return json.dumps(content).encode()


def _listed(text: bytes) -> PieceTable:
    content = json.loads(text)
    table = PieceTable(LocalStorage(), content["path"], "", content["step"])
    for name, (dtype, shape) in content["tensors"].items():
        table.add("model", name, StoredTensorInfo(dtype, tuple(shape)), [])
    table.aliases["model"] = content["aliases"]
    table.values["model"] = content["values"]
    return table
