"""Load from files that only one rank can see: it reads them and sends every rank its part. Layer: checkpoint.

This is the only way to load that communicates. If all ranks see the files, `load` is faster, because ranks do not wait
for each other.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.io.catalog import Catalog, PieceTable, StoredTensorInfo
from fsdp2.checkpoint.io.reading import Filler
from fsdp2.checkpoint.loading import Loaded, requests_for
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.ranks.agreement import world_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.run.replacing import READS, not_replaced
from fsdp2.checkpoint.state.sources import Sources
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import ArgumentError, CheckpointError, MismatchError, ReplacedError
from fsdp2.placement.box import Box, whole

__all__ = ["load_from_rank"]

CHUNK_BYTES = 16 << 20  # per message: what the reader holds besides its own shards
FAILED = -1  # instead of a mark


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
    model. One rank reads each rank's part of each tensor and sends it, in messages of at most 16 MiB. No rank ever
    holds a whole tensor.

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
        try:
            return _load(folder, model, _Matches(sources, strict, cast), _Channel(world, process_group, rank))
        except ReplacedError:  # on all ranks, so that all start again
            if not reads_left:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Matches:
    """What matches; see `load`."""

    sources: Sources | None
    strict: bool
    cast: bool


def _load(
    folder: str | os.PathLike[str], model: nn.Module | Mapping[str, Any], matches: _Matches, channel: "_Channel"
) -> Loaded:
    """Load what is currently in the folder."""
    files: _Files | None = None
    try:
        with channel.failing():
            files = _Files(folder) if channel.reads else None
            listing = _listing(files.catalog) if files is not None else b""  # may read from disk: formats are lazy
        listed = _listed(channel.tell(listing))
        matching = Matching(listed, channel.world, matches.cast, matches.sources)
        _match(matching, model, matches.strict, channel)
        _agreed(channel, lambda: _make_ready(channel, files, matching, model))
        with channel.failing():
            for need in matching.needs:
                _transfer(channel, files, need)
        channel.end()
    finally:
        if files is not None:
            files.close()
    matching.finish()
    return Loaded(listed.path, listed.step, {}, matching.missing, matching.unexpected)


def _match(matching: Matching, model: nn.Module | Mapping[str, Any], strict: bool, channel: "_Channel") -> None:
    """Match on all ranks with the same request, and so the same result; otherwise all ranks stop."""

    def asked() -> int:
        matching.match(model, None, strict)
        asked = [(need.entry.name, need.entry.tiling, need.entry.local.dtype) for need in matching.needs]
        return zlib.crc32(repr(asked).encode(errors="backslashreplace"))

    _agreed(channel, asked)


def _agreed(channel: "_Channel", step: Callable[[], int | None]) -> None:
    """Let every rank do `step`; if it raises on one, or returns something else than on the reader, all ranks stop."""
    try:
        mark = step()
    except BaseException as error:
        with suppress(CheckpointError):
            channel.agree(FAILED, f"{type(error).__name__}: {error}")
        raise
    channel.agree(mark or 0)


def _make_ready(
    channel: "_Channel", files: "_Files | None", matching: Matching, model: nn.Module | Mapping[str, Any]
) -> None:
    """What may fail before values are sent, on one rank alone."""
    if files is not None:
        files.compare(matching.twins)
    matching.allocate(model, None)
    channel.allocate([need.entry.local.element_size() for need in matching.needs])


def _transfer(channel: "_Channel", files: "_Files | None", need: Need) -> None:
    """Transfer one tensor in parts. A part that several ranks need is read only once."""
    holders: dict[Box, list[int]] = {}
    for rank in range(channel.world.size):
        box = need.entry.tiling.box_of(rank)
        if box is not None and box.numel:
            holders.setdefault(box, []).append(rank)
    local = need.entry.local
    for box, ranks in holders.items():
        own = channel.world.rank in ranks
        for part in _parts(box, local.element_size()) if own or files is not None else ():
            place = local[part.within(box).slices()] if own else torch.empty(part.shape, dtype=local.dtype)
            if files is None:
                channel.receive(place)
            else:
                files.read(need, part, place)
                channel.send(place, ranks)


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
        self._filler = Filler(self.catalog.storage)

    def read(self, need: Need, part: Box, into: torch.Tensor) -> None:
        """A part of a tensor that some rank needs."""
        with not_replaced(self._storage, self._path, self.catalog):
            self._filler.fill(requests_for(self.catalog, need, part, into))

    def compare(self, twins: Iterable[tuple[Need, Need]]) -> None:
        """Check that weights that are tied here have the same values under both names; `MismatchError` if not."""
        for one, other in twins:
            entry = one.entry
            for part in _parts(whole(entry.tiling.shape), entry.local.element_size()):
                values = torch.empty((2, *part.shape), dtype=entry.local.dtype)
                self.read(one, part, values[0])
                self.read(other, part, values[1])
                if not torch.equal(_as_bytes(values[0]), _as_bytes(values[1])):
                    raise MismatchError(
                        f"{self.catalog.path}: {_quoted(one)} and {_quoted(other)} are stored apart with different "
                        "values, but are one weight here. Load into a model that does not tie them."
                    )

    def close(self) -> None:
        """Release the files."""
        self._filler.close()
        self.catalog.close()


class _Channel:
    """The channel from the reader to the other ranks. Before each message the reader sends whether it has failed. A
    receiver that cannot keep what it gets goes on receiving, and says so at the end. So no rank waits for one that has
    failed, and no rank considers a model loaded that the others do not have.

    Args:
        reader: rank within the group.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, reader: int):
        self.world = world
        self.reads = world.rank == reader
        self._group = group
        self._reader = reader
        self._others = [rank for rank in range(world.size) if rank != reader]
        cuda = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._error: Exception | None = None  # of a receiver
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within this context, an error of the reader is sent to the others, which wait for its next message."""
        try:
            yield
        except BaseException as error:
            if self.reads:
                self._refuse(f"{type(error).__name__}: {error}")
            raise

    def tell(self, content: bytes) -> bytes:
        """Send bytes from the reader to all ranks."""
        if not self.reads:
            return self._get(self._hear())
        for receiver in self._others:
            self._say(len(content), receiver)
            self._put(content, receiver)
        return content

    def agree(self, mark: int, why: str = "") -> None:
        """Every rank calls this. `CheckpointError` if a rank passed `FAILED`, or another mark than the reader. The
        others learn `why` the reader failed."""
        if not self.reads:
            dist.send(torch.tensor([mark], device=self._device), group=self._group, group_dst=self._reader)
            self._hear()
            return
        marks = {rank: self._number(rank) for rank in self._others}
        failed = [rank for rank, other in marks.items() if other == FAILED]
        different = [rank for rank, other in marks.items() if other != mark]
        if FAILED in (mark, *marks.values()):
            problem = why or f"ranks {failed} failed; see their errors"
        elif different:
            problem = f"ranks {different} ask for other tensors, or other parts, than rank {self._reader}: all must"
            problem += " give the same model, sharded over the same mesh"
        else:
            for receiver in self._others:
                self._say(0, receiver)
            return
        self._refuse(problem)
        raise CheckpointError(f"load_from_rank: {problem}")

    def send(self, values: torch.Tensor, receivers: Sequence[int]) -> None:
        """Send the success mark, then the values."""
        host = values.to(self._device).contiguous()
        for receiver in receivers:
            if receiver != self._reader:
                self._say(0, receiver)
                dist.send(_as_bytes(host), group=self._group, group_dst=receiver)

    def allocate(self, itemsizes: Sequence[int]) -> None:
        """Allocate what every message of a receiver fits into."""
        if not self.reads:
            self._buffer = torch.empty(max([CHUNK_BYTES, *itemsizes]), dtype=torch.uint8, device=self._device)

    def receive(self, place: torch.Tensor) -> None:
        """Receive into a tensor of any layout and device."""
        self._hear()
        received = self._buffer[: place.numel() * place.element_size()]
        dist.recv(received, group=self._group, group_src=self._reader)
        try:
            place.copy_(received.view(place.dtype).view(place.shape))
        except Exception as error:
            self._error = self._error or error

    def end(self) -> None:
        """Everything was sent; raise if a rank could not keep what it got."""
        if not self.reads:
            self._hear()
        for receiver in self._others if self.reads else ():
            self._say(0, receiver)

        def check() -> None:
            if self._error is not None:
                raise self._error

        _agreed(self, check)

    def _refuse(self, why: str) -> None:
        """Tell the others that loading failed. Never raises, because one of them may be gone."""
        for receiver in self._others:
            with suppress(RuntimeError):
                text = why.encode(errors="backslashreplace")
                self._say(-1 - len(text), receiver)
                self._put(text, receiver)

    def _say(self, number: int, receiver: int) -> None:
        """Send a number. A negative number n announces a text of -1 - n bytes with the reason of a failure."""
        dist.send(torch.tensor([number], device=self._device), group=self._group, group_dst=receiver)

    def _hear(self) -> int:
        number = self._number(self._reader)
        if number < 0:
            why = self._get(-1 - number).decode()
            kind = ReplacedError if why.startswith(f"{ReplacedError.__name__}: ") else CheckpointError
            raise kind(f"load_from_rank: rank {self._reader}, which reads, gave up: {why}")
        return number

    def _number(self, sender: int) -> int:
        number = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(number, group=self._group, group_src=sender)
        return int(number.item())

    def _put(self, content: bytes, receiver: int) -> None:
        if content:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
            dist.send(data, group=self._group, group_dst=receiver)

    def _get(self, size: int) -> bytes:
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            dist.recv(data, group=self._group, group_src=self._reader)
        return bytes(data.tolist())


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, since backends do not support all dtypes."""
    return values.reshape(-1).view(torch.uint8)


def _quoted(need: Need) -> str:
    return ", ".join(f"'{name}'" for name in sorted(need.source.names()))


def _listing(catalog: Catalog) -> bytes:
    """A catalog's listing of its model, for the ranks that cannot see it."""
    content = {
        "path": catalog.path,
        "kind": catalog.kind,
        "step": catalog.step,
        "tensors": {name: [info.dtype, info.shape] for name, info in catalog.tensors.get("model", {}).items()},
        "aliases": dict(catalog.aliases.get("model", {})),
        "values": list(catalog.values.get("model", ())),
        "left_out": dict(catalog.left_out.get("model", {})),  # after the values, which may add to it
    }
    return json.dumps(content).encode()


def _listed(text: bytes) -> PieceTable:
    content = json.loads(text)
    table = PieceTable(LocalStorage(), content["path"], content["kind"], content["step"])
    for name, (dtype, shape) in content["tensors"].items():
        table.add("model", name, StoredTensorInfo(dtype, tuple(shape)), [])
    table.aliases["model"] = content["aliases"]
    table.values["model"] = content["values"]
    table.left_out["model"] = content["left_out"]
    return table
