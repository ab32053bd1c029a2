"""Convert a checkpoint of any format to whole tensors, with Hugging Face's index. Layer: checkpoint.

One process does it, without a GPU. The files are planned as `save` plans consolidated ones, and written by the same
code, but the bytes are read from the old checkpoint a chunk at a time, so a tensor larger than a few chunks is never in
memory completely. The new folder gets its name when all of it is durable.
"""

import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
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
from fsdp2.checkpoint.run.folders import delete, free_name, own_folder, sweep, work_folder
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES, name_of
from fsdp2.checkpoint.schema.manifest import MANIFEST, body_of, table_of
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, UnsupportedError
from fsdp2.placement.box import Box, boxes_of_flat_range, whole
from fsdp2.placement.tiling import replicated

__all__ = ["convert"]

# Given a view to fill, and which part of a tensor that is: fills it.
Fill = Callable[[torch.Tensor, Box], None]
# Section -> name -> (dtype, shape) of the tensors to write.
Rows = dict[str, dict[str, tuple[str, tuple[int, ...]]]]

# Conversions between these only lose precision. With other dtypes (integers, 8-bit floats, whose scales are stored
# elsewhere) the values would change their meaning.
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


def convert(
    source: Folder,
    target: Folder,
    *,
    dtype: torch.dtype | None = None,
    model_only: bool = False,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> str:
    """Rewrite a checkpoint as whole tensors, with Hugging Face's index, in files of up to ``max_file_bytes``. One
    process calls this; no process group is needed.

    The values stay bitwise the same (except with `dtype`). Optimizer state, tied names, the step and the extra state
    are kept; the extra state keeps its number of ranks. Like every checkpoint, the result can be loaded on any number
    of ranks.

    Args:
        source: any checkpoint that `load` supports; what it has checksums for is checked.
        target: a folder that does not exist yet.
        dtype: convert the model's floating point tensors to this.
        model_only: without optimizer and extra state.
        max_file_bytes: as for `save`.
        overwrite: as for `save`.

    Returns:
        The new folder.

    Raises:
        ArgumentError: an option is invalid.
        CheckpointError: there is no checkpoint at `source`, or something exists at `target`.
        CorruptError: the source is damaged. The new folder is removed then (in an object store, files may stay).
        UnsupportedError: the source has something that cannot be read. `describe` lists it.

    Warns:
        UserWarning: the source has something that is neither model nor optimizer, which is left out.

    Example::

        fsdp2.checkpoint.convert("runs/a/step-00001000", "export", model_only=True)
    """
    if max_file_bytes < 1:
        raise ArgumentError(f"convert: max_file_bytes is positive, got {max_file_bytes}")
    if dtype is not None and name_of(dtype) not in FLOATS:
        raise ArgumentError(f"convert: dtype is a floating point type of 16 bits or more; got {dtype}")
    storage, path = storage_of(target)
    free_name(storage, path, overwrite)
    catalog = open_catalog(*storage_of(source))
    nonce = uuid.uuid4().hex[:12]
    work = work_folder(storage, path, nonce)
    try:
        rows = _rows(catalog, model_only, None if dtype is None else name_of(dtype))
        storage.make_folder(work)
        with own_folder(storage, work, path):
            content, names = _write(catalog, storage, work, rows, nonce, max_file_bytes, not model_only)
            put_in_place(storage, work, path, content, nonce, overwrite)
        gone = sweep(storage, path, names)
    except BaseException:
        if storage.renames:
            with suppress(OSError):
                storage.remove(work)
        raise
    finally:
        catalog.close()
    delete(storage, gone)
    return path


def _rows(catalog: Catalog, model_only: bool, to: str | None) -> Rows:
    """The tensors to write. Checks, before anything is written, that nothing that was asked for is lost, and that all
    parts exist."""
    rows: Rows = {}
    sections = ("model",) if model_only else ("model", "optimizer")
    for section in sections:
        infos = catalog.tensors.get(section, {})
        if catalog.values_of(section) or infos:  # in this order: it finds what is left out
            cast = {} if to is None or section != "model" else dict.fromkeys(FLOATS, to)
            rows[section] = {name: (cast.get(info.dtype, info.dtype), info.shape) for name, info in infos.items()}
    asked = [(section, name, why) for section in sections for name, why in catalog.left_out.get(section, {}).items()]
    if lost := [f"{section} '{name}' ({why})" for section, name, why in asked]:
        raise UnsupportedError(
            f"{catalog.path}: convert cannot read {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. To have the "
            "rest, load it with strict=False and save that."
        )
    others = [*catalog.left_out.get("", ())]
    if others and not model_only:
        warnings.warn(
            f"convert: leaves out {', '.join(others[:5])}{', ...' if len(others) > 5 else ''} ({len(others)} in all), "
            "which are neither model nor optimizer",
            stacklevel=3,
        )
    for section, own in rows.items():
        for name, (_, shape) in own.items():
            catalog.covering(section, name, whole(shape))
    return rows


def _write(
    catalog: Catalog,
    storage: Storage,
    work: str,
    rows: Rows,
    save_id: str,
    max_file_bytes: int,
    with_extra: bool,
) -> tuple[bytes, list[str]]:
    """Write everything but the manifest to the folder `work`. Returns the manifest, and the names of the files.

    Raises:
        CheckpointError: without renames: the folder has a file of one of the names, or another save or conversion has
            written there.
    """
    homes: Homes = {section: consolidated_homes(section, own, max_file_bytes) for section, own in rows.items()}
    indexes = index_files(homes)
    native = catalog if isinstance(catalog, NativeCatalog) and with_extra else None
    extra_files = _extra_files(native, storage, save_id) if native is not None else {}
    files = [*extra_files.values()]
    for section, own in rows.items():
        pieces = [
            _piece(name, dtype, whole(shape), partial(_fill, catalog, section, name))
            for name, (dtype, shape) in own.items()
        ]
        # No other process writes to them.
        files += [replace(file, shared=False) for file in consolidated_files(homes[section], pieces, 0, 1)]
    # Without renames the folder may have a user's files, and consolidated files have no names of their own.
    names = {*indexes, *(file.name for file in files if not file.by_content)}
    if not storage.renames and (taken := sorted(names.intersection(storage.names(work)))):
        raise CheckpointError(
            f"{work}: has {', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}, which the conversion would write "
            "over. Convert to another folder, or delete what is there."
        )
    written = [write_file(storage, work, file) for file in files]
    new_names = {old: file.name for old, file in zip(extra_files, written, strict=False)}
    extra = {
        key: [{**share, "file": new_names[share["file"]]} for share in shares]
        for key, shares in (native.extra if native is not None else {}).items()
    }
    for name, index in indexes.items():
        storage.write_all(storage.join(work, name), index)
        written.append(Written(name, len(index), f"{zlib.crc32(index):08x}", {}))
    body = body_of(
        save_id,
        {file.name: [file.size, file.header_crc] for file in written},
        _tables(catalog, rows),
        homes,
        step=catalog.step,
        world=1,
        extra=extra,
        sums=[joined_sums(written, homes)],
        extra_world=native.extra_world if native is not None else 1,
    )
    content = encoded(body, storage.join(work, MANIFEST), "convert")
    sizes = storage.sizes(work)
    if any(sizes.get(file.name) != file.size for file in written):
        raise CheckpointError(f"{work}: another save has written there in the meantime; convert to another folder")
    return content, [file.name for file in written]


def _tables(catalog: Catalog, rows: Rows) -> list[dict[str, Any]]:
    """What one rank holds. Values other than tensors stay as they were: one table for each kind of rank. The first
    table has all tensors."""
    tilings = {
        section: {name: (dtype, replicated(shape, (0,))) for name, (dtype, shape) in own.items()}
        for section, own in rows.items()
    }
    tables = [table_of(tilings, {section: dict(catalog.aliases.get(section, {})) for section in rows}, {})]
    for section in rows:
        tables += [table_of({}, {}, {section: values}) for values in catalog.values_of(section)]
    return [{**table, "ranks": [0]} for table in tables]


def _extra_files(catalog: NativeCatalog, storage: Storage, save_id: str) -> dict[str, PlannedFile]:
    """The files of the extra state, by their old names."""
    names = dict.fromkeys(str(share["file"]) for shares in catalog.extra.values() for share in shares)
    files = {}
    for number, file in enumerate(names):
        pieces = []
        for name in catalog.header_of(file).tensors:
            stored = catalog.extra_piece(file, name)
            pieces.append(_piece(name, stored.dtype, stored.box, partial(_fill_from, catalog, stored, name)))
        about = {"id": save_id, "rank": number, "world": catalog.extra_world}
        files[file] = rank_files("extra", pieces, about, storage)[0]
    return files


def _fill(catalog: Catalog, section: str, name: str, out: torch.Tensor, box: Box) -> None:
    catalog.read([Part(section, name, box, out, f"{section} '{name}'")], num_threads=0)


def _fill_from(catalog: Catalog, piece: StoredPiece, name: str, out: torch.Tensor, box: Box) -> None:
    read_all(catalog.opened, [Request(f"extra '{name}'", out, box, piece)], num_threads=0)


def _piece(name: str, dtype: str, box: Box, fill: Fill) -> Piece:
    """A piece whose values come from the old checkpoint."""
    empty = torch.empty(box.shape, dtype=DTYPES[dtype], device="meta")
    return Piece(name, dtype, box, empty, box.shape, partial(_stored_blocks, fill, box.shape, dtype))


def _stored_blocks(
    fill: Fill, shape: tuple[int, ...], dtype: str, first: int, last: int
) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a stored tensor, converted to a dtype, row by row, in blocks, like `blocks_of` for
    tensors in memory. Any number of threads may call this; `CorruptError` if they are damaged or incomplete."""
    itemsize = ITEMSIZES[dtype]
    for start in range(first, last, BUFFER_BYTES):
        data = bytearray(min(BUFFER_BYTES, last - start))
        flat, filled = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]), 0
        for part in boxes_of_flat_range(shape, start // itemsize, (start + len(data)) // itemsize):
            fill(flat[filled : filled + part.numel].view(part.shape), part)
            filled += part.numel
        for at in range(0, len(data), BLOCK):
            # A caller that batches writes after each chunk.
            yield memoryview(data)[at : at + BLOCK], at + BLOCK < len(data)
