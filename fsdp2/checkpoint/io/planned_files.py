"""What a rank writes, planned before the first byte: its own files, or its rows of files that all ranks share.
Layer: checkpoint.

A `Piece` is the part of a stored tensor that this rank writes. In a rank's own file the container is the piece itself.
In a consolidated file the container is the whole tensor, and other ranks write the rest.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from fsdp2.checkpoint.io.memory import blocks_of, part_of
from fsdp2.checkpoint.ranks.world import Entry
from fsdp2.checkpoint.schema.checksum import BLOCK, WIDTH, num_blocks
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.header import MAX_HEADER_BYTES, encode_header
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box, whole
from fsdp2.placement.tiling import Tiling

__all__ = [
    "PART_BYTES",
    "Homes",
    "Piece",
    "PlannedFile",
    "Sums",
    "Written",
    "consolidated_files",
    "consolidated_homes",
    "joined_sums",
    "named_by_content",
    "owned_pieces",
    "rank_file_name",
    "rank_files",
]

# If folders cannot be renamed, a rank writes files of about this size. Each is one request (s3fs splits more than 50
# MiB), which can be repeated alone if it fails, and is not sent again after a restart.
PART_BYTES = 48 << 20

# Consolidated files: section -> file -> [(name, dtype, shape)] of the tensors in it.
Homes = dict[str, dict[str, list[tuple[str, str, tuple[int, ...]]]]]

# The checksums of a file: name -> one for each block.
Sums = dict[str, list[str]]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes.

    Attributes:
        dtype: its name in safetensors.
        box: the part, in coordinates of the whole tensor.
        values: a plain tensor of the box's shape, on any device.
        shape: the shape of the whole tensor.
        source: for values that come from another checkpoint: yields bytes ``first..last`` as `blocks_of` does. In this
            case `values` is a meta tensor.
    """

    name: str
    dtype: str
    box: Box
    values: torch.Tensor
    shape: tuple[int, ...]
    source: Callable[[int, int], Iterator[tuple[memoryview, bool]]] | None = None

    def blocks(self, first: int, last: int) -> Iterator[tuple[memoryview, bool]]:
        """Bytes ``first..last`` of the values in blocks; see `blocks_of`."""
        if self.source is not None:
            return self.source(first, last)
        return blocks_of(self.values, first, last, BLOCK)

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.box.numel * ITEMSIZES[self.dtype]

    def cut(self, nbytes: int) -> "Iterator[Piece]":
        """The piece, with values in memory, in parts of at most `nbytes` bytes, or of one row."""
        dim = next((dim for dim, size in enumerate(self.box.shape) if size > 1), None)
        if dim is None or self.nbytes <= nbytes:
            yield self
            return
        start, shape = self.box.start, self.box.shape
        step = max(1, nbytes * shape[dim] // self.nbytes)
        for first in range(0, shape[dim], step):
            count = min(step, shape[dim] - first)
            box = Box((*start[:dim], start[dim] + first, *start[dim + 1 :]), (*shape[:dim], count, *shape[dim + 1 :]))
            yield replace(self, box=box, values=self.values.narrow(dim, first, count))


@dataclass(frozen=True)
class Written:
    """A file, or this rank's part of one, after it became durable.

    Attributes:
        size: bytes of the file.
        header_crc: CRC-32 of its header (for JSON: of the whole file), if this rank wrote the header.
        sums: checksums of this rank's pieces.
    """

    name: str
    size: int
    header_crc: str | None
    sums: Sums


@dataclass(frozen=True)
class PlannedFile:
    """A file, and this rank's part of it.

    Attributes:
        size: bytes of the whole file.
        pieces: (offset of the container in the file, container, piece).
        header: returns the first bytes of the file, given the checksums of all pieces; None if another rank writes
            them.
        shared: other ranks write to it too.
        by_content: its name comes from `named_by_content`, so an existing file of that name and size has this content.
    """

    name: str
    size: int
    pieces: list[tuple[int, Box, Piece]]
    header: Callable[[Sums], bytes] | None
    shared: bool = False
    by_content: bool = False


def owned_pieces(entries: Mapping[str, Entry], rows: Mapping[str, tuple[str, Tiling]], rank: int) -> Iterator[Piece]:
    """The parts that `rank` writes.

    Args:
        rows: name -> (dtype, how the tensor is split for writing: as it is sharded, or finer, see `spread_replicas`).
    """
    for name, (dtype, tiling) in rows.items():
        box, entry = tiling.written_by(rank), entries[name]
        if box is not None:
            values = entry.local if box == entry.box else part_of(entry.local, box.within(entry.box))
            yield Piece(name, dtype, box, values, tiling.shape)


def rank_file_name(section: str, rank: int, world: int) -> str:
    """The name of a rank's own file."""
    return f"{section}-rank-{rank:05d}-of-{world:05d}.safetensors"


def named_by_content(file: str, header: bytes) -> str:
    """The name of a rank's own file if a save writes directly to the final folder: different values have different
    names."""
    return f"{file.removesuffix('.safetensors')}-{hashlib.sha256(header).hexdigest()[:12]}.safetensors"


def rank_files(section: str, pieces: Sequence[Piece], about: Mapping[str, Any], storage: Storage) -> list[PlannedFile]:
    """The files with everything that one rank writes of a section: one file, or several if folders cannot be renamed.

    Args:
        about: id, rank and world, which each file repeats to distinguish it from files of other saves.
    """
    # Large items first, so that every tensor is aligned. Small tensors are then adjacent, and can be read together.
    ordered = sorted(pieces, key=lambda piece: (-ITEMSIZES[piece.dtype], piece.nbytes, piece.name))
    lots = [ordered] if storage.renames or section == "extra" else _lots(ordered, PART_BYTES)
    return [_rank_file(section, lot, about, not storage.renames) for lot in lots]


def _lots(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces, or parts of them, for files of at most `limit` bytes. A file has at most one part of each tensor."""
    lot: list[Piece] = []
    for piece in pieces:
        for part in piece.cut(limit):
            if lot and (lot[-1].name == part.name or sum(one.nbytes for one in lot) + part.nbytes > limit):
                yield lot
                lot = []
            lot.append(part)
    if lot:
        yield lot


def _rank_file(section: str, ordered: Sequence[Piece], about: Mapping[str, Any], by_content: bool) -> PlannedFile:
    shards = {piece.name: [list(piece.shape), list(piece.box.start)] for piece in ordered}
    own = json.dumps({**about, "shards": shards}, separators=(",", ":")).removesuffix("}")
    rows = [(piece.name, piece.dtype, piece.box.shape) for piece in ordered]
    counts = {piece.name: num_blocks(piece.nbytes) for piece in ordered}

    def header(sums: Sums) -> bytes:
        texts = json.dumps({name: "".join(blocks) for name, blocks in sums.items()}, separators=(",", ":"))
        return encode_header(rows, {"format": "pt", "fsdp2": f'{own},"sums":{texts}}}'})

    end = _checked(len(header({name: ["0" * WIDTH] * count for name, count in counts.items()})), section)
    placed = []
    for piece in ordered:
        placed.append((end, piece.box, piece))
        end += piece.nbytes
    name = rank_file_name(section, about["rank"], about["world"])
    return PlannedFile(name, end, placed, header, by_content=by_content)


def consolidated_homes(
    section: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], max_bytes: int
) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Distribute whole tensors over files: file -> [(name, dtype, shape)]. The result is the same on all ranks.

    Args:
        tensors: name -> (dtype, shape).
        max_bytes: the maximum bytes of data per file, unless a single tensor is larger.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * ITEMSIZES[dtype]
        if groups[-1] and filled + nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, dtype, shape))
        filled += nbytes
    count = len(groups)
    names = [f"{section}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    return dict(zip(names if count > 1 else [f"{section}.safetensors"], groups, strict=True))


def consolidated_files(
    homes: Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]], pieces: Sequence[Piece], rank: int, world: int
) -> list[PlannedFile]:
    """This rank's part of the files of `consolidated_homes`. Each rank begins with a different file, so that they do
    not all write to the same one."""
    by_name = {piece.name: piece for piece in pieces}
    planned = []
    for number, (file, tensors) in enumerate(homes.items()):
        ordered = sorted(tensors, key=lambda row: (-ITEMSIZES[row[1]], row[0]))
        header = encode_header(ordered, {"format": "pt"})
        end = _checked(len(header), file)
        placed = []
        for name, dtype, shape in ordered:
            if name in by_name:
                placed.append((end, whole(shape), by_name[name]))
            end += prod(shape) * ITEMSIZES[dtype]
        mine = number % world == rank
        if placed or mine:
            maker = (lambda sums, header=header: header) if mine else None
            planned.append(PlannedFile(file, end, placed, maker, shared=world > 1))
    turn = rank * len(planned) // world
    return planned[turn:] + planned[:turn]


def joined_sums(written: Iterable[Written], homes: Homes) -> dict[str, dict[str, str]]:
    """The checksums of a rank's parts of consolidated files, whose headers have none: file -> name -> sums."""
    shared = {file for files in homes.values() for file in files}
    return {
        file.name: {name: "".join(blocks) for name, blocks in file.sums.items()}
        for file in written
        if file.name in shared
    }


def _checked(header_bytes: int, what: str) -> int:
    if header_bytes > MAX_HEADER_BYTES:
        raise ArgumentError(
            f"{what}: the header of a safetensors file would have {header_bytes} bytes; the format allows "
            f"{MAX_HEADER_BYTES}. Save in parts, or with more ranks."
        )
    return header_bytes
