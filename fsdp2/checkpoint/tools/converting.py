"""Convert a checkpoint: another number of ranks, another layout, another format. Layer: checkpoint.

One process does it, without a GPU. The files are planned as `save` plans those of its ranks, and written by the same
code, but the bytes are read from the old checkpoint a chunk at a time, so a tensor larger than a few chunks is never in
memory completely. The new folder gets its name when all of it is durable.
"""

import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog, id_of
from fsdp2.checkpoint.io.catalog import Catalog, Part
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.io.planned_files import (
    Homes,
    Piece,
    PlannedFile,
    Written,
    consolidated_files,
    consolidated_homes,
    joined_sums,
    rank_files,
)
from fsdp2.checkpoint.io.reading import BUFFER_BYTES, Request, read_all
from fsdp2.checkpoint.io.writing import write_file
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.run.committing import encoded, index_files, put_in_place
from fsdp2.checkpoint.run.folders import delete, free_name, is_complete, own_folder, sweep, work_folder
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES, name_of
from fsdp2.checkpoint.schema.manifest import MANIFEST, body_of, table_of
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, UnsupportedError
from fsdp2.placement.box import Box, boxes_of_flat_range, whole
from fsdp2.placement.tiling import Grid, Tiling, replicated

__all__ = ["LAYOUTS", "convert"]

LAYOUTS = ("ranks", "consolidated")

# Given a view to fill, and which part of a tensor that is: fills it.
Fill = Callable[[torch.Tensor, Box], None]

# Conversions between these only lose precision. With other dtypes (integers, 8-bit floats, whose scales are stored
# elsewhere) the values would change their meaning.
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


def convert(
    source: Folder,
    target: Folder,
    *,
    to: str = "ranks",
    world: int = 1,
    dtype: torch.dtype | None = None,
    model_only: bool = False,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Rewrite a checkpoint in another form. One process calls this; no process group is needed.

    The values stay bitwise the same (except with `dtype`). Optimizer state, tied names, the step and the extra state
    are kept; the extra state keeps its number of ranks. Like every checkpoint, the result can be loaded on any number
    of ranks: `world` only determines the files.

    Args:
        source: any checkpoint that `load` supports.
        target: a folder that does not exist yet.
        to: "ranks": the files of `world` ranks, each tensor cut by rows. "consolidated": whole tensors, with Hugging
            Face's index, in files of up to ``max_file_bytes``.
        dtype: convert the model's floating point tensors to this.
        model_only: without optimizer and extra state.
        max_file_bytes: as for `save`.
        overwrite: as for `save`.
        verify: check the source's checksums.

    Returns:
        The new folder.

    Raises:
        ArgumentError: an option is invalid.
        CheckpointError: there is no checkpoint at `source`, or something exists at `target`.
        CorruptError: the source is damaged. The new folder is removed then.
        UnsupportedError: the source has something that cannot be read. `describe` lists it.

    Warns:
        UserWarning: the source has something that is neither model nor optimizer, which is left out.

    Example::

        fsdp2.checkpoint.convert("runs/a/step-00001000", "export", to="consolidated", model_only=True)
    """
    options = _Options(to, world, dtype, max_file_bytes, model_only, overwrite, verify)
    storage, path = storage_of(target)
    free_name(storage, path, overwrite)
    catalog = open_catalog(*storage_of(source))
    nonce = uuid.uuid4().hex[:12]
    work = work_folder(storage, path, nonce)
    files: list[str] = []
    try:
        storage.make_folder(work)
        with own_folder(storage, work, path):
            _Rewriting(catalog, storage, options, nonce, files).run(work, path)
        gone = sweep(storage, path, files)
    except BaseException:
        if storage.renames:
            with suppress(OSError):
                storage.remove(work)
        else:
            delete(storage, _own_files(storage, path, files, nonce))
        raise
    finally:
        catalog.close()
    delete(storage, gone)
    return path


def _own_files(storage: Storage, path: str, names: list[str], nonce: str) -> list[str]:
    """Files of a failed conversion, in a folder that others may write to. None if the conversion was committed and only
    the answer to that request was lost. Consolidated files are excluded if the folder is another checkpoint."""
    with suppress(OSError):
        if id_of(storage, path) != nonce:
            taken = is_complete(storage, path)
            return [storage.join(path, name) for name in names if "-rank-" in name or not taken]
    return []


@dataclass(frozen=True)
class _Options:
    """What to convert to; see `convert`."""

    to: str
    world: int
    dtype: torch.dtype | None
    max_file_bytes: int
    model_only: bool
    overwrite: bool
    verify: bool

    def __post_init__(self) -> None:
        if self.to not in LAYOUTS:
            raise ArgumentError(f"convert: to is one of {', '.join(LAYOUTS)}; got {self.to!r}")
        if self.world < 1 or self.max_file_bytes < 1:
            raise ArgumentError(f"convert: world and max_file_bytes are positive, got {self}")
        if self.world > 1 and self.to != "ranks":
            raise ArgumentError(f"convert: world={self.world} has no effect on to={self.to!r}, which has no ranks")
        if self.dtype is not None and name_of(self.dtype) not in FLOATS:
            raise ArgumentError(f"convert: dtype is a floating point type of 16 bits or more; got {self.dtype}")


@dataclass
class _Rewriting:
    """One conversion.

    Attributes:
        id: of the new checkpoint.
        names: of the files that were begun.
    """

    catalog: Catalog
    storage: Storage
    options: _Options
    id: str
    names: list[str]
    _rows: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)  # (dtype, shape) by name

    def run(self, work: str, path: str) -> None:
        """Write everything to the folder `work`, the manifest last, and give it the name `path`.

        Raises:
            UnsupportedError: the old checkpoint has something that cannot be read.
            CheckpointError: without renames: the folder has a file of one of the names, or another save or conversion
                has written there.
        """
        sections = ("model",) if self.options.model_only else ("model", "optimizer")
        to = None if self.options.dtype is None else name_of(self.options.dtype)
        for section in sections:
            infos = self.catalog.tensors.get(section, {})
            if self.catalog.values_of(section) or infos:  # in this order: it finds what is left out
                cast = {} if to is None or section != "model" else dict.fromkeys(FLOATS, to)
                rows = {name: (cast.get(info.dtype, info.dtype), info.shape) for name, info in infos.items()}
                self._rows[section] = rows
        self._check(sections)
        homes: Homes = {}
        if self.options.to == "consolidated":
            limit = self.options.max_file_bytes
            homes = {section: consolidated_homes(section, rows, limit) for section, rows in self._rows.items()}
        indexes = index_files(homes)
        extra_files = self._extra_files()
        files = [*extra_files.values(), *self._files(homes)]
        # Without renames the folder may have a user's files, and consolidated files have no names of their own.
        names = {*indexes, *(file.name for file in files if not file.by_content)}
        if not self.storage.renames and (taken := sorted(names.intersection(self.storage.names(work)))):
            raise CheckpointError(
                f"{work}: has {', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}, which the conversion "
                "would write over. Convert to another folder, or delete what is there."
            )
        written: list[Written] = []
        for file in files:
            self.names += [] if file.by_content else [file.name]
            written.append(write_file(self.storage, work, file))
            self.names += [written[-1].name] if file.by_content else []
        extra = dict(zip(extra_files, (file.name for file in written), strict=False))
        for name, index in indexes.items():
            self.names.append(name)
            self.storage.write_all(self.storage.join(work, name), index)
            written.append(Written(name, len(index), f"{zlib.crc32(index):08x}", {}))
        content = encoded(self._body(written, homes, extra), self.storage.join(work, MANIFEST), "convert")
        sizes = self.storage.sizes(work)
        if any(sizes.get(file.name) != file.size for file in written):
            raise CheckpointError(f"{work}: another save has written there in the meantime; convert to another folder")
        put_in_place(self.storage, work, path, content, self.id, self.options.overwrite)

    def _check(self, sections: Sequence[str]) -> None:
        """Check, before anything is written, that nothing that was asked for is lost, and that all parts exist."""
        left_out = self.catalog.left_out
        asked = [(section, name, why) for section in sections for name, why in left_out.get(section, {}).items()]
        if lost := [f"{section} '{name}' ({why})" for section, name, why in asked]:
            raise UnsupportedError(
                f"{self.catalog.path}: convert cannot read {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. To "
                "have the rest, load it with strict=False and save that."
            )
        others = [*left_out.get("", ())]
        if others and not self.options.model_only:
            warnings.warn(
                f"convert: leaves out {', '.join(others[:5])}{', ...' if len(others) > 5 else ''} ({len(others)} in "
                "all), which are neither model nor optimizer",
                stacklevel=4,
            )
        for section, rows in self._rows.items():
            for name, (_, shape) in rows.items():
                self.catalog.covering(section, name, whole(shape))

    def _tiling(self, shape: tuple[int, ...]) -> Tiling:
        """By rows over all ranks."""
        ranks = tuple(range(self.options.world))
        return Tiling(shape, Grid((len(ranks),), ranks), ((0, 0),)) if shape else replicated(shape, ranks)

    def _files(self, homes: Homes) -> list[PlannedFile]:
        planned: list[PlannedFile] = []
        world = self.options.world
        for section, rows in self._rows.items():
            for rank in range(world):
                pieces = [
                    self._piece(name, dtype, box, shape, partial(self._fill, section, name))
                    for name, (dtype, shape) in rows.items()
                    if (box := self._tiling(shape).written_by(rank)) is not None
                ]
                if homes:
                    shared = consolidated_files(homes[section], pieces, rank, world)
                    planned += [replace(file, shared=False) for file in shared]  # no other process writes to them
                elif pieces:
                    planned += self._rank_files(section, pieces, rank, world)
        return planned

    def _rank_files(self, section: str, pieces: list[Piece], rank: int, world: int) -> list[PlannedFile]:
        about = {"id": self.id, "rank": rank, "world": world}
        return rank_files(section, pieces, about, self.storage)

    def _extra_files(self) -> dict[str, PlannedFile]:
        """The files of the extra state, by their old names."""
        if not isinstance(self.catalog, NativeCatalog) or self.options.model_only:
            return {}
        manifest = self.catalog.manifest
        names = dict.fromkeys(str(share["file"]) for shares in manifest.extra.values() for share in shares)
        files: dict[str, PlannedFile] = {}
        for number, file in enumerate(names):
            pieces = []
            for name in self.catalog.header_of(file).tensors:
                stored = self.catalog.extra_piece(file, name)
                fill = partial(self._fill_from, stored, f"extra '{name}'")
                pieces.append(self._piece(name, stored.dtype, stored.box, stored.box.shape, fill))
            files[file] = self._rank_files("extra", pieces, number, manifest.extra_world)[0]
        return files

    def _fill(self, section: str, name: str, out: torch.Tensor, box: Box) -> None:
        part = Part(section, name, box, out, f"{section} '{name}'")
        self.catalog.read([part], self.options.verify, num_threads=0)

    def _fill_from(self, piece: StoredPiece, what: str, out: torch.Tensor, box: Box) -> None:
        read_all(self.catalog.opened, [Request(what, out, box, piece)], self.options.verify, num_threads=0)

    def _piece(self, name: str, dtype: str, box: Box, shape: tuple[int, ...], fill: Fill) -> Piece:
        """A piece whose values come from the old checkpoint."""
        empty = torch.empty(box.shape, dtype=DTYPES[dtype], device="meta")
        return Piece(name, dtype, box, empty, shape, partial(_stored_blocks, fill, box, dtype))

    def _body(self, written: Sequence[Written], homes: Homes, names: Mapping[str, str]) -> dict[str, Any]:
        """The body of the manifest.

        Args:
            names: of the files of the extra state, by their old ones.
        """
        tilings = {
            section: {name: (dtype, self._tiling(shape)) for name, (dtype, shape) in rows.items()}
            for section, rows in self._rows.items()
        }
        aliases = {section: dict(self.catalog.aliases.get(section, {})) for section in self._rows}
        kept = {section: list(self.catalog.values_of(section)) for section in self._rows}
        ranks = list(range(self.options.world))
        # Values other than tensors stay as they were: one table for each kind of rank. The first table has all tensors.
        tables = [{**table_of(tilings, aliases, {}), "ranks": ranks}]
        for number in range(max(map(len, kept.values()), default=0)):
            values = {section: rows[number] for section, rows in kept.items() if number < len(rows)}
            tables.append({**table_of({}, {}, values), "ranks": ranks})
        manifest = self.catalog.manifest if isinstance(self.catalog, NativeCatalog) else None
        extra = {
            key: [{**share, "file": names[share["file"]]} for share in shares]
            for key, shares in (manifest.extra if manifest and names else {}).items()
        }
        return body_of(
            self.id,
            {file.name: [file.size, file.header_crc] for file in written},
            tables,
            homes,
            step=self.catalog.step,
            world=len(ranks),
            extra=extra,
            sums=[joined_sums(written, homes)] if homes else [],
            extra_world=manifest.extra_world if manifest else len(ranks),
        )


def _stored_blocks(fill: Fill, box: Box, dtype: str, first: int, last: int) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a part of a stored tensor, row by row, in blocks, like `blocks_of` for tensors in
    memory. Any number of threads may call this.

    Args:
        box: the part of the tensor.
        dtype: the dtype to convert the values to, by its name in safetensors.

    Raises:
        CorruptError: they are damaged or incomplete.
    """
    itemsize = ITEMSIZES[dtype]
    for start in range(first, last, BUFFER_BYTES):
        data = bytearray(min(BUFFER_BYTES, last - start))
        flat, filled = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]), 0
        for part in boxes_of_flat_range(box.shape, start // itemsize, (start + len(data)) // itemsize):
            place = Box(tuple(a + b for a, b in zip(part.start, box.start, strict=True)), part.shape)
            fill(flat[filled : filled + part.numel].view(part.shape), place)
            filled += part.numel
        for at in range(0, len(data), BLOCK):
            # A caller that batches writes after each chunk.
            yield memoryview(data)[at : at + BLOCK], at + BLOCK < len(data)
