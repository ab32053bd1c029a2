"""The manifest: the small file, written last, that makes a folder a checkpoint. Pure: bytes in, bytes out.

``checkpoint.json`` is ``{"crc32": ..., "body": {...}}``. The body:

=============  ====================================================================================================
format         "fsdp2/2"; a reader rejects formats that it does not know
id             id of this save; every file has it, so files of two saves cannot be mixed
files_id       the id in the files, if not `id`: behind a URL a save may reuse the files of a dead one
step, world    as given to `save`; the number of ranks
layout         "ranks" (each rank has its own files) or "consolidated" (whole tensors, in Hugging Face's layout)
files          name -> [bytes, CRC-32 of the header (for JSON: of the whole file)]
tables         what ranks hold, see `table_of`; ranks that hold the same share one
homes          consolidated: section -> name of a tensor -> file
extra          key -> list of {"json", "file", "ranks"}: the values that ranks passed; ranks with equal values share one
sums           consolidated: for each rank file -> name -> checksums of the blocks of its part; absent otherwise
=============  ====================================================================================================

Its size grows with the number of parameters plus the number of ranks, not with their product: which rank holds which
part of a tensor is computed from the tiling.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.header import MAX_DIMS, parse_json
from fsdp2.checkpoint.storage.base import check_file_name
from fsdp2.errors import CorruptError
from fsdp2.placement.tiling import Grid, Tiling

__all__ = ["FORMAT", "MANIFEST", "MAX_MANIFEST_BYTES", "SECTIONS", "Manifest", "Record", "body_of", "table_of"]

FORMAT = "fsdp2/2"
MANIFEST = "checkpoint.json"
MAX_MANIFEST_BYTES = 1 << 27
MAX_WORLD = 1 << 20
LAYOUT = re.compile(rb'\{"crc32": "[^"]*", "body": (.*)\}\n', re.DOTALL)
SECTIONS = ("model", "optimizer")


@dataclass(frozen=True, slots=True)
class Record:
    """The description of one tensor.

    Attributes:
        dtype: its name in safetensors.
        tiling: which rank wrote which part.
    """

    dtype: str
    tiling: Tiling

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.tiling.shape

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; see the module docstring.

    Attributes:
        records: section -> name -> record.
        aliases: section -> name -> the name under which its values are stored.
        values: section -> values other than tensors, from each kind of rank.
    """

    id: str
    step: int | None
    world: int
    layout: str
    files: Mapping[str, tuple[int, str]]
    records: Mapping[str, Mapping[str, Record]]
    aliases: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Sequence[Mapping[str, Any]]]
    homes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    extra: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    sums: Sequence[Mapping[str, Mapping[str, str]]] = ()
    files_id: str = ""

    @staticmethod
    def encode(body: Mapping[str, Any]) -> bytes:
        """The content of the file for a body."""
        text = _canonical(body)
        return f'{{"crc32": "{zlib.crc32(text):08x}", "body": '.encode() + text + b"}\n"

    @classmethod
    def parse(cls, content: bytes, file: str) -> "Manifest":
        """Read a manifest.

        Raises:
            CorruptError: it is damaged, or was written by another program or a later version.
        """
        outer = parse_json(content, file)
        if not isinstance(outer, dict) or outer.keys() != {"crc32", "body"} or not isinstance(outer["body"], dict):
            raise CorruptError(f"{file}: is not the manifest of a checkpoint")
        body = outer["body"]
        found = LAYOUT.fullmatch(content)
        checksum = f"{zlib.crc32(found[1] if found else content):08x}"
        if outer["crc32"] != checksum:
            raise CorruptError(
                f"{file}: its checksum is {checksum}, it should be {str(outer['crc32'])[:20]}: it is damaged"
            )
        if body.get("format") != FORMAT:
            raise CorruptError(
                f"{file}: format {str(body.get('format'))[:40]!r}; this version of fsdp2 reads {FORMAT!r}. A later "
                "version may have written it."
            )
        try:
            return cls._from_body(body, file)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptError(f"{file}: is malformed ({type(error).__name__}: {error})") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any], file: str) -> "Manifest":
        files = {check_file_name(name, file): (_size(size), str(crc)) for name, (size, crc) in body["files"].items()}
        homes = {
            section: {name: _listed(home, files, file) for name, home in names.items()}
            for section, names in body["homes"].items()
        }
        if body["layout"] not in ("ranks", "consolidated"):
            raise CorruptError(f"{file}: layout {body['layout']!r} is not known")
        if not 0 < (world := _size(body["world"])) <= MAX_WORLD:
            raise ValueError(f"{world} is not a number of ranks")
        for key, shares in body["extra"].items():
            for share in shares:
                _listed(share["file"], files, file)
                if (
                    share["key"] != key
                    or "json" not in share
                    or not isinstance(share["ranks"], list)
                    or not all(0 <= rank < world for rank in share["ranks"])
                ):
                    raise CorruptError(f"{file}: the extra state '{key}' is malformed")
        records: dict[str, dict[str, Record]] = {section: {} for section in SECTIONS}
        aliases: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        values: dict[str, list[Any]] = {section: [] for section in SECTIONS}
        for table in body["tables"]:
            grids = [Grid(_shape(mesh["shape"]), _sizes(mesh["ranks"])) for mesh in table["meshes"]]
            known: dict[Any, Record] = {}
            for section, names in table["tensors"].items():
                for name, row in names.items():
                    records[section][name] = _record(name, row, grids, known, file)
            for section, names in table["aliases"].items():
                aliases[section].update(names)
            for section, value in table["values"].items():
                if not isinstance(value, dict):
                    raise CorruptError(f"{file}: the values of {section} are malformed")
                values[section].append(value)
        for section, names in aliases.items():
            for name, target in names.items():
                if not isinstance(target, str) or target not in records[section]:
                    raise CorruptError(f"{file}: '{name}' is an alias of {str(target)[:80]!r}, which is not there")
        stored = sum(record.nbytes for names in records.values() for record in names.values())
        if stored > sum(size for size, _ in files.values()):
            raise CorruptError(f"{file}: describes tensors of {stored} bytes, and all files together are smaller")
        step = None if body["step"] is None else _size(body["step"])
        sums = body.get("sums", [])
        if not all(isinstance(of_file, dict) for of_rank in sums for of_file in of_rank.values()):
            raise CorruptError(f"{file}: the checksums are malformed")
        files_id = str(body.get("files_id", body["id"]))
        fixed = (str(body["id"]), step, world, body["layout"])
        return cls(*fixed, files, records, aliases, values, homes, body["extra"], sums, files_id)


def table_of(
    tilings: Mapping[str, Mapping[str, tuple[str, Tiling]]],
    aliases: Mapping[str, Mapping[str, str]],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """What one rank holds, as JSON; equal on all ranks that have the same model.

    Args:
        tilings: section -> name -> (dtype, tiling).
        aliases, values: by section.
    """
    grids: dict[Grid, int] = {}
    tensors = {
        section: {
            name: [
                dtype,
                list(tiling.shape),
                grids.setdefault(tiling.grid, len(grids)),
                [list(cut) for cut in tiling.cuts],
            ]
            for name, (dtype, tiling) in names.items()
        }
        for section, names in tilings.items()
    }
    meshes = [{"shape": list(grid.shape), "ranks": list(grid.ranks)} for grid in grids]
    return {"meshes": meshes, "tensors": tensors, "aliases": dict(aliases), "values": dict(values)}


def body_of(
    save_id: str,
    files: Mapping[str, Sequence[Any]],
    tables: Sequence[Mapping[str, Any]],
    homes: Mapping[str, Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]]],
    **rest: Any,
) -> dict[str, Any]:
    """The body of a manifest; see the module docstring.

    Args:
        homes: consolidated: section -> file -> (name, dtype, shape) of its tensors; else empty.
        rest: the other parts; `sums` and `files_id` are left out if they are empty.
    """
    return {
        "format": FORMAT,
        "id": save_id,
        "layout": "consolidated" if homes else "ranks",
        "files": files,
        "tables": tables,
        "homes": {
            section: {name: file for file, rows in placed.items() for name, _, _ in rows}
            for section, placed in homes.items()
        },
        **{key: value for key, value in rest.items() if value or key not in ("sums", "files_id")},
    }


def _record(name: str, row: Sequence[Any], grids: Sequence[Grid], known: dict[Any, Record], file: str) -> Record:
    """The record of a row of a table. Equal rows share one, so that its tiling's cached results are reused."""
    dtype, shape, mesh, cuts = row
    pairs = tuple([(int(axis), int(dim)) for axis, dim in cuts])
    key = (dtype, tuple(shape), mesh, pairs)
    if key not in known:
        grid = grids[mesh]
        axes, size = [axis for axis, _ in pairs], prod(grid.shape)
        in_range = all(0 <= axis < len(grid.shape) and 0 <= dim < len(shape) for axis, dim in pairs)
        if dtype not in ITEMSIZES or size != len(grid.ranks) or not size or not in_range or len(set(axes)) != len(axes):
            raise CorruptError(f"{file}: the record of '{name}' is malformed: {str(row)[:80]}")
        known[key] = Record(dtype, Tiling(_shape(shape), grid, pairs))
    return known[key]


def _listed(name: object, files: Iterable[str], file: str) -> str:
    if not isinstance(name, str) or name not in files:
        raise CorruptError(f"{file}: {str(name)[:80]!r} is needed and not among the files of the checkpoint")
    return name


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a size")
    return value


def _sizes(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _shape(values: Sequence[object]) -> tuple[int, ...]:
    """The sizes of a tensor or of a mesh. Their number is limited: multiplying very many sizes takes minutes."""
    if len(values) > MAX_DIMS:
        raise ValueError(f"{len(values)} dims; expected at most {MAX_DIMS}, as torch has")
    return _sizes(values)


def _canonical(body: Mapping[str, Any]) -> bytes:
    """The canonical text of a body: parsing and encoding it again gives the same text, including floats."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
