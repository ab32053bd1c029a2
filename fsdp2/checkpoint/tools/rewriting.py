"""Write the content of any checkpoint as a new native one. Layer: checkpoint.

The files are planned as `save` plans those of its ranks, and written by the same code. But the bytes are read from the
old checkpoint a chunk at a time, so a tensor larger than a few chunks is never in memory completely.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.io.planned_files import (
    Homes,
    Piece,
    PlannedFile,
    Written,
    consolidated_files,
    consolidated_homes,
    joined_sums,
    rank_file,
)
from fsdp2.checkpoint.io.reading import Request
from fsdp2.checkpoint.io.writing import write_files
from fsdp2.checkpoint.run.committing import encoded, index_files, put_in_place
from fsdp2.checkpoint.schema.dtypes import DTYPES, name_of
from fsdp2.checkpoint.schema.manifest import MANIFEST, body_of, table_of
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.checkpoint.tools.streaming import Asking, Meter, Progress, stored_blocks
from fsdp2.errors import ArgumentError, CheckpointError, UnsupportedError
from fsdp2.placement.box import Box, whole
from fsdp2.placement.tiling import Grid, Tiling, replicated

__all__ = ["LAYOUTS", "Conversion", "Rewriting"]

LAYOUTS = ("ranks", "consolidated")

# (dtype, shape) of a tensor in the new checkpoint.
Row = tuple[str, tuple[int, ...]]

# Conversions between these only lose precision. With other dtypes (integers, 8-bit floats, whose scales are stored
# elsewhere) the values would change their meaning.
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@dataclass(frozen=True)
class Conversion:
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
class Rewriting:
    """One conversion to a native checkpoint.

    Attributes:
        id: of the new checkpoint.
        names: of the files that were begun.
    """

    catalog: Catalog
    storage: Storage
    options: Conversion
    id: str
    names: list[str]
    _tensors: dict[str, dict[str, Row]] = field(default_factory=dict)

    def run(self, work: str, path: str, progress: Progress | None) -> None:
        """Write everything to the folder `work`, the manifest last, and give it the name `path`.

        Raises:
            UnsupportedError: the old checkpoint has something that cannot be read.
            CheckpointError: without renames: the folder has a file of one of the names, or another save or conversion
                has written there.
        """
        sections = ("model",) if self.options.model_only else ("model", "optimizer")
        to = None if self.options.dtype is None else name_of(self.options.dtype)
        for section in sections:
            infos, values_there = self.catalog.tensors.get(section, {}), self.catalog.values.get(section)
            if infos or values_there:
                cast = {} if to is None or section != "model" else dict.fromkeys(FLOATS, to)
                rows = {name: (cast.get(info.dtype, info.dtype), info.shape) for name, info in infos.items()}
                self._tensors[section] = rows
        self._check_left_out(sections)
        self._check_cover()
        homes: Homes = {}
        if self.options.to == "consolidated":
            limit = self.options.max_file_bytes
            homes = {section: consolidated_homes(section, rows, limit) for section, rows in self._tensors.items()}
        indexes = index_files(homes)
        extra, extra_files = self._extra()
        files = [*self._files(homes), *extra_files]
        names = {*indexes, *(file.name for file in files)}
        # Without renames the folder may have a user's files, and consolidated files have no names of their own.
        if not self.storage.renames and (taken := sorted(names.intersection(self.storage.names(work)))):
            raise CheckpointError(
                f"{work}: has {', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}, which the conversion "
                "would write over. Convert to another folder, or delete what is there."
            )
        meter = Meter(sum(piece.nbytes for file in files for _, _, piece in file.pieces), progress)
        written: list[Written] = []
        for file in files:
            self.names.append(file.name)
            written += write_files(self.storage, work, [file], meter.add)
        meter.finish()
        written += [self._write_json(work, name, index) for name, index in indexes.items()]
        content = encoded(self._body(written, homes, extra), self.storage.join(work, MANIFEST), "convert")
        sizes = self.storage.sizes(work)
        if any(sizes.get(file.name) != file.size for file in written):
            raise CheckpointError(f"{work}: another save has written there in the meantime; convert to another folder")
        put_in_place(self.storage, work, path, content, self.id, self.options.overwrite)

    def _check_left_out(self, sections: Sequence[str]) -> None:
        """Nothing that was asked for may be lost; what is neither model nor optimizer has no place in the new one."""
        left_out = self.catalog.left_out
        asked = [(section, name, why) for section in sections for name, why in left_out.get(section, {}).items()]
        lost = [f"{section} '{name}' ({why})" for section, name, why in asked]
        if lost:
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

    def _check_cover(self) -> None:
        """Check that all parts exist, before anything is written."""
        for section, rows in self._tensors.items():
            for name, (_, shape) in rows.items():
                self.catalog.covering(section, name, whole(shape))

    def _tiling(self, shape: tuple[int, ...]) -> Tiling:
        """By rows over all ranks."""
        ranks = tuple(range(self.options.world))
        return Tiling(shape, Grid((len(ranks),), ranks), ((0, 0),)) if shape else replicated(shape, ranks)

    def _files(self, homes: Homes) -> list[PlannedFile]:
        planned: list[PlannedFile] = []
        for section, rows in self._tensors.items():
            for rank in range(self.options.world):
                pieces = []
                for name, (dtype, shape) in rows.items():
                    tiling = self._tiling(shape)
                    box = tiling.box_of(rank)
                    if box is not None and tiling.owns(rank) and (box.numel or not prod(shape)):
                        pieces.append(self._piece(name, dtype, box, shape, partial(self._ask, section, name)))
                if homes:
                    shared = consolidated_files(homes[section], pieces, rank, self.options.world)
                    planned += [replace(file, shared=False) for file in shared]  # no other process writes to them
                elif pieces:
                    planned.append(self._rank_file(section, pieces, rank, self.options.world))
        return planned

    def _rank_file(self, section: str, pieces: list[Piece], rank: int, world: int) -> PlannedFile:
        """A rank's own file. Without renames its name is unique to this save or conversion."""
        return rank_file(section, pieces, {"id": self.id, "rank": rank, "world": world}, self.storage)

    def _extra(self) -> tuple[dict[str, Any], list[PlannedFile]]:
        """The extra state and its files, unchanged."""
        if not isinstance(self.catalog, NativeCatalog) or self.options.model_only:
            return {}, []
        catalog, manifest = self.catalog, self.catalog.manifest
        names = list(dict.fromkeys(str(share["file"]) for shares in manifest.extra.values() for share in shares))
        files = {}
        for number, file in enumerate(names):
            pieces = []
            for name in catalog.header_of(file).tensors:
                stored = catalog.extra_piece(file, name)
                ask = partial(_just, stored, f"extra '{name}'")
                pieces.append(self._piece(name, stored.dtype, stored.box, stored.box.shape, ask))
            files[file] = self._rank_file("extra", pieces, number, manifest.extra_world)
        extra = {
            key: [{**share, "file": files[share["file"]].name} for share in shares]
            for key, shares in manifest.extra.items()
        }
        return extra, list(files.values())

    def _ask(self, section: str, name: str, target: torch.Tensor, box: Box) -> list[Request]:
        return self.catalog.requests(section, name, target, box, f"{section} '{name}'")

    def _piece(self, name: str, dtype: str, box: Box, shape: tuple[int, ...], ask: Asking) -> Piece:
        """A piece whose values come from the old checkpoint."""
        empty = torch.empty(box.shape, dtype=DTYPES[dtype], device="meta")
        blocks = partial(stored_blocks, self.catalog, ask, self.options.verify, box, dtype)
        return Piece(name, dtype, box, empty, shape, blocks)

    def _write_json(self, work: str, name: str, content: bytes) -> Written:
        self.names.append(name)
        self.storage.write_all(self.storage.join(work, name), content)
        return Written(name, len(content), f"{zlib.crc32(content):08x}", {})

    def _body(self, written: Sequence[Written], homes: Homes, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the manifest."""
        tilings = {
            section: {name: (dtype, self._tiling(shape)) for name, (dtype, shape) in rows.items()}
            for section, rows in self._tensors.items()
        }
        aliases = {section: dict(self.catalog.aliases.get(section, {})) for section in self._tensors}
        kept = {section: list(self.catalog.values.get(section, ())) for section in self._tensors}
        ranks = list(range(self.options.world))
        # Values other than tensors stay as they were: one table for each kind of rank. The first table has all tensors.
        tables = [{**table_of(tilings, aliases, {}), "ranks": ranks}]
        for number in range(max(map(len, kept.values()), default=0)):
            values = {section: rows[number] for section, rows in kept.items() if number < len(rows)}
            tables.append({**table_of({}, {}, values), "ranks": ranks})
        manifest = self.catalog.manifest if isinstance(self.catalog, NativeCatalog) else None
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
            about=manifest.about if manifest else {},
        )


def _just(piece: StoredPiece, what: str, target: torch.Tensor, box: Box) -> list[Request]:
    return [Request(what, target, box, piece)]
