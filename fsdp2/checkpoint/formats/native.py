"""The catalog of a folder that `save` wrote. Layer: checkpoint.

Everything is verified: the manifest has a checksum, and contains the size of every file and the checksum of its header;
the header contains the checksums of all blocks. Every file repeats the id of the save, its rank and the places of its
tensors.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import uncollected
from fsdp2.checkpoint.io.pieces import StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.io.planned_files import rank_file_name
from fsdp2.checkpoint.schema.checksum import WIDTH, num_blocks
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.header import MAX_HEADER_BYTES, Header, StoredTensor, parse_header, parse_json
from fsdp2.checkpoint.schema.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Record
from fsdp2.checkpoint.storage.base import Reader, Storage
from fsdp2.errors import CorruptError, FSDPError
from fsdp2.placement.box import Box, whole

NATIVE = "fsdp2"  # `Catalog.kind`
PART = re.compile(r"-[0-9a-f]{12}\.safetensors$")  # the end of a `named_by_content`

__all__ = ["NATIVE", "NativeCatalog", "check_sizes", "id_of", "read_header", "read_manifest", "read_small"]


def read_small(storage: Storage, path: str, limit: float = inf) -> bytes:
    """The content of a small text file (JSON).

    Raises:
        CheckpointError: it cannot be opened.
        CorruptError: it is larger than `limit` bytes. In this case nothing is read.
    """
    with closing(storage.open_file(path)) as reader:
        if reader.size > limit:
            raise CorruptError(f"{path}: has {reader.size} bytes; such a file has at most {limit}")
        return _read_text(reader, 0, reader.size)


def _read_text(reader: Reader, offset: int, count: int) -> bytes:
    content = bytearray(count)
    reader.read_into(offset, memoryview(content))
    return bytes(content)


@uncollected()
def read_manifest(storage: Storage, path: str) -> Manifest:
    """The manifest of a folder; `CorruptError` if it is damaged."""
    file = storage.join(path, MANIFEST)
    return Manifest.parse(read_small(storage, file, MAX_MANIFEST_BYTES), file)


def id_of(storage: Storage, folder: str) -> str | None:
    """The id of the save in exactly this folder; None if there is none, or it cannot be read. See `id_at`."""
    with suppress(FSDPError, OSError):
        return read_manifest(storage, folder).id
    return None


def check_sizes(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Check that all files exist with the sizes that the manifest lists; `CorruptError` if not."""
    sizes = storage.sizes(folder)
    for name, (size, _) in manifest.files.items():
        found = sizes.get(name)
        if found != size:
            what = "is missing (or a link)" if found is None else f"has {found} bytes"
            raise CorruptError(f"{storage.join(folder, name)}: {what}; the manifest lists {size} bytes")


def read_header(reader: Reader, path: str, expected: tuple[int, str] | None = None) -> Header:
    """The header of a safetensors file.

    Args:
        path: the path of the file that `reader` has open.
        expected: (bytes of the file, CRC-32 of the header), as listed in the manifest.

    Raises:
        CorruptError: it is damaged, or not the expected file.
    """
    if expected is not None and reader.size != expected[0]:
        raise CorruptError(
            f"{path}: has {reader.size} bytes, and the manifest lists {expected[0]}: it was truncated or changed"
        )
    start = bytearray(8)
    reader.read_into(0, memoryview(start))
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES or 8 + length > reader.size:
        raise CorruptError(f"{path}: claims a header of {length} bytes; it is incomplete, or not a safetensors file")
    text = _read_text(reader, 8, length)
    crc = f"{zlib.crc32(text, zlib.crc32(start)):08x}"
    if expected is not None and crc != expected[1]:
        raise CorruptError(
            f"{path}: the header (bytes 0..{8 + length}) has checksum {crc}, and the manifest lists {expected[1]}"
        )
    return parse_header(text, path, reader.size)


@dataclass(frozen=True)
class _RankFile:
    """A rank's own file, with its header checked."""

    path: str
    header: Header
    shards: Mapping[str, Any]
    sums: Mapping[str, str]


class NativeCatalog(Catalog):
    """See `Catalog`, and the module docstring. Opened by `open_catalog`."""

    def __init__(self, storage: Storage, path: str, manifest: Manifest):
        tensors = {
            section: {name: StoredTensorInfo(record.dtype, record.shape) for name, record in records.items()}
            for section, records in manifest.records.items()
        }
        super().__init__(storage, path, NATIVE, manifest.step, tensors, manifest.aliases)
        self.manifest, self.values, self.extra, self.world = manifest, manifest.values, manifest.extra, manifest.world
        self._files: dict[str, _RankFile] = {}
        self._own: dict[tuple[str, int], list[_RankFile]] = {}
        self._headers: dict[str, Header] = {}

    @property
    def files(self) -> Iterable[str]:
        """See `Catalog`."""
        return [self.storage.join(self.path, MANIFEST)]  # it has the id of the save

    def header_of(self, file: str) -> Header:
        """The header of a safetensors file that the manifest lists."""
        if file not in self._headers:
            path = self.storage.join(self.path, file)
            with self.opened.use(path) as reader:
                self._headers[file] = read_header(reader, path, self.manifest.files[file])
        return self._headers[file]

    def json_of(self, file: str) -> Any:
        """The content of a JSON file that the manifest lists."""
        path = self.storage.join(self.path, file)
        size, crc = self.manifest.files.get(file, (0, ""))
        content = read_small(self.storage, path, min(size, MAX_MANIFEST_BYTES))
        if f"{zlib.crc32(content):08x}" != crc:
            raise CorruptError(
                f"{path}: has checksum {zlib.crc32(content):08x}, and the manifest lists {crc or 'no such file'}"
            )
        return parse_json(content, path)

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        record = self.manifest.records[section][name]
        for rank, box in record.tiling.owners(wanted):
            if self.manifest.layout == "consolidated":
                yield self._shared_piece(section, name, rank, box, record.dtype)
            else:
                yield from self._own_pieces(section, name, rank, box, record)

    def extra_pieces(self, file: str, key: str) -> list[StoredPiece]:
        """The tensors of a value of the extra state, which one rank wrote completely."""
        names = self.header_of(file).tensors
        return [self.extra_piece(file, name) for name in names if name.startswith(f"{key}/")]

    def extra_piece(self, file: str, name: str) -> StoredPiece:
        """A tensor of the extra state."""
        held = self._rank_file(file, None)
        if name not in held.header.tensors:
            raise CorruptError(f"{held.path}: lacks '{name}', which the manifest lists")
        box = whole(held.header.tensors[name].shape)
        return self._piece_of(held, name, box)

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """The names of the files of each rank and section, by the name of a single one."""
        names: dict[str, list[str]] = {}
        for file in self.manifest.files:
            names.setdefault(PART.sub(".safetensors", file), []).append(file)
        return names

    def _own_pieces(self, section: str, name: str, rank: int, box: Box, record: Record) -> Iterator[StoredPiece]:
        if (section, rank) not in self._own:
            single = rank_file_name(section, rank, self.manifest.world)
            files = self._names.get(single, [single])
            self._own[section, rank] = [self._rank_file(file, rank) for file in files]
        every = self._own[section, rank]
        found = [held for held in every if name in held.header.tensors]
        for held in found or every[:1]:
            stored, shard = held.header.tensors.get(name), held.shards.get(name)
            part = _box_of(stored, shard, record)
            if stored is None or part is None or (part != box and part.intersect(box) != part):
                what = "none of it" if stored is None else f"{list(stored.shape)} of [whole, start] {shard}"
                raise CorruptError(
                    f"{held.path}: should hold rows {list(box.start)}..{list(box.end)} of '{name}' "
                    f"{list(record.shape)}, and holds {what}"
                )
            yield self._piece_of(held, name, part)

    def _piece_of(self, held: _RankFile, name: str, box: Box) -> StoredPiece:
        stored = held.header.tensors[name]
        sums = _checked_sums(held.sums.get(name), stored.nbytes, held.path, name)
        return StoredPiece(held.path, stored.offset, box, box, stored.dtype, sums)

    def _shared_piece(self, section: str, name: str, rank: int, box: Box, dtype: str) -> StoredPiece:
        file = self.manifest.homes.get(section, {}).get(name)
        if file is None:
            raise CorruptError(f"{self.path}: the manifest does not say in which file '{name}' is")
        path = self.storage.join(self.path, file)
        stored = self.header_of(file).tensors.get(name)
        record = self.manifest.records[section][name]
        if stored is None or (stored.dtype, stored.shape) != (record.dtype, record.shape):
            raise CorruptError(f"{path}: should hold '{name}' {record.dtype} {list(record.shape)}, and does not")
        sums = self.manifest.sums[rank].get(file, {}).get(name) if rank < len(self.manifest.sums) else None
        nbytes = box.numel * ITEMSIZES[dtype]
        checked = _checked_sums(sums, nbytes, path, name)
        return StoredPiece(path, stored.offset, whole(stored.shape), box, dtype, checked)

    def _rank_file(self, file: str, rank: int | None) -> _RankFile:
        if file not in self._files:
            path = self.storage.join(self.path, file)
            if file not in self.manifest.files:
                raise CorruptError(f"{path}: is needed, and the manifest does not list it")
            header = self.header_of(file)
            about = parse_json(header.metadata.get("fsdp2", "null").encode(errors="surrogatepass"), path)
            fields = [about.get(key) for key in ("shards", "sums")] if isinstance(about, dict) else [None]
            if not all(isinstance(each, dict) for each in fields):
                raise CorruptError(f"{path}: was not written by this program")
            if about.get("id") != self.manifest.files_id or (rank is not None and about.get("rank") != rank):
                raise CorruptError(
                    f"{path}: is of save {str(about.get('id'))[:40]!r}, rank {str(about.get('rank'))[:8]}; the "
                    f"manifest is of save {self.manifest.files_id!r}. Files of two saves are mixed here."
                )
            self._files[file] = _RankFile(path, header, about["shards"], about["sums"])
        return self._files[file]


def _box_of(stored: StoredTensor | None, shard: object, record: Record) -> Box | None:
    """The part of a tensor that is stored under its name in a rank's file; None if the file contradicts the record."""
    if stored is None or stored.dtype != record.dtype or not isinstance(shard, list) or len(shard) != 2:
        return None
    shape, start = shard
    known = shape == list(record.shape) and isinstance(start, list) and len(start) == len(stored.shape)
    return Box(tuple(start), stored.shape) if known and all(type(first) is int for first in start) else None


def _checked_sums(sums: object, nbytes: int, path: str, name: str) -> str:
    if not isinstance(sums, str) or len(sums) != WIDTH * num_blocks(nbytes):
        raise CorruptError(f"{path}: the checksums of '{name}' are missing, or there is not one per block")
    return sums
