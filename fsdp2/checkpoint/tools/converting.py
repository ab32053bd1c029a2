"""Convert the model of a checkpoint of any format to whole tensors, with Hugging Face's index. Layer: checkpoint.

One process does it, without a GPU. The files are planned as `save` plans consolidated ones, and written by the same
code, but the bytes are read from the old checkpoint a chunk at a time, so a tensor larger than a few chunks is never in
memory completely. The new folder gets its name when all of it is durable.
"""

import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fsdp2.checkpoint.io.catalog import Catalog, Part
from fsdp2.checkpoint.io.planned_files import (
    Homes,
    Piece,
    Written,
    consolidated_files,
    consolidated_homes,
    joined_sums,
)
from fsdp2.checkpoint.io.reading import BUFFER_BYTES
from fsdp2.checkpoint.io.writing import write_file
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.run.committing import encoded, index_files, put_in_place
from fsdp2.checkpoint.run.folders import delete, free_name, own_folder, sweep, work_folder
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES, name_of
from fsdp2.checkpoint.schema.manifest import MANIFEST, body_of, table_of
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, UnsupportedError
from fsdp2.placement.box import boxes_of_flat_range, whole
from fsdp2.placement.tiling import replicated

__all__ = ["convert"]

# Name -> (dtype, shape) of the tensors to write.
Rows = dict[str, tuple[str, tuple[int, ...]]]

# Conversions between these only lose precision. With other dtypes (integers, 8-bit floats, whose scales are stored
# elsewhere) the values would change their meaning.
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


def convert(
    source: Folder,
    target: Folder,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> str:
    """Rewrite the model of a checkpoint as whole tensors, with Hugging Face's index, in files of up to
    ``max_file_bytes``. One process calls this; no process group is needed.

    The values stay bitwise the same (except with `dtype`), and tied names and the step are kept. The result is a
    checkpoint of the model alone: its optimizer and extra state stay where they are.

    Args:
        source: any checkpoint that `load` supports; what it has checksums for is checked.
        target: a folder that does not exist yet.
        dtype: convert the floating point tensors to this.
        max_file_bytes: as for `save`.
        overwrite: as for `save`.

    Returns:
        The new folder.

    Raises:
        ArgumentError: an option is invalid.
        CheckpointError: there is no checkpoint at `source`, or something exists at `target`.
        CorruptError: the source is damaged. The new folder is removed then (in an object store, files may stay).
        UnsupportedError: the model has something that cannot be read. `describe` lists it.

    Example::

        fsdp2.checkpoint.convert("runs/a/step-00001000", "export")
    """
    if max_file_bytes < 1:
        raise ArgumentError(f"convert: max_file_bytes is positive, got {max_file_bytes}")
    to = None if dtype is None else name_of(dtype)
    if dtype is not None and to not in FLOATS:
        raise ArgumentError(f"convert: dtype is a floating point type of 16 bits or more; got {dtype}")
    storage, path = storage_of(target)
    free_name(storage, path, overwrite)
    catalog = open_catalog(*storage_of(source))
    nonce = uuid.uuid4().hex[:12]
    work = work_folder(storage, path, nonce)
    try:
        rows = _rows(catalog, to)
        storage.make_folder(work)
        with own_folder(storage, work, path):
            content, names = _write(catalog, storage, work, rows, nonce, max_file_bytes)
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


def _rows(catalog: Catalog, to: str | None) -> Rows:
    """The tensors to write. Checks, before anything is written, that nothing is lost, and that all parts exist."""
    if lost := [f"'{name}' ({why})" for name, why in catalog.left_out.get("model", {}).items()]:
        raise UnsupportedError(
            f"{catalog.path}: convert cannot read {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. To have the "
            "rest, load it with strict=False and save that."
        )
    rows: Rows = {}
    for name, (dtype, shape) in catalog.tensors["model"].items():
        rows[name] = (to if to is not None and dtype in FLOATS else dtype, shape)
        catalog.covering("model", name, whole(shape))
    return rows


def _write(
    catalog: Catalog, storage: Storage, work: str, rows: Rows, save_id: str, max_file_bytes: int
) -> tuple[bytes, list[str]]:
    """Write everything but the manifest to the folder `work`. Returns the manifest, and the names of the files.

    Raises:
        CheckpointError: without renames: the folder has a file of one of the names, or another save or conversion has
            written there.
    """
    homes: Homes = {"model": consolidated_homes("model", rows, max_file_bytes)}
    indexes = index_files(homes)
    pieces = [_piece(catalog, name, *row) for name, row in rows.items()]
    # No other process writes to them.
    files = [replace(file, shared=False) for file in consolidated_files(homes["model"], pieces, 0, 1)]
    # Without renames the folder may have a user's files, and consolidated files have no names of their own.
    names = {*indexes, *(file.name for file in files)}
    if not storage.renames and (taken := sorted(names.intersection(storage.names(work)))):
        raise CheckpointError(
            f"{work}: has {', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}, which the conversion would write "
            "over. Convert to another folder, or delete what is there."
        )
    written = [write_file(storage, work, file) for file in files]
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
        extra={},
        sums=[joined_sums(written, homes)],
    )
    content = encoded(body, storage.join(work, MANIFEST), "convert")
    sizes = storage.sizes(work)
    if any(sizes.get(file.name) != file.size for file in written):
        raise CheckpointError(f"{work}: another save has written there in the meantime; convert to another folder")
    return content, [file.name for file in written]


def _tables(catalog: Catalog, rows: Rows) -> list[dict[str, Any]]:
    """What one rank holds. Values other than tensors stay as they were: one table for each kind of rank. The first
    table has all tensors."""
    tilings = {"model": {name: (dtype, replicated(shape, (0,))) for name, (dtype, shape) in rows.items()}}
    tables = [table_of(tilings, {"model": catalog.aliases.get("model", {})}, {})]
    tables += [table_of({}, {}, {"model": values}) for values in catalog.values.get("model", ())]
    return [{**table, "ranks": [0]} for table in tables]


def _piece(catalog: Catalog, name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """A piece whose values come from the old checkpoint."""
    empty = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    return Piece(name, dtype, whole(shape), empty, shape, partial(_stored_blocks, catalog, name, shape, dtype))


def _stored_blocks(
    catalog: Catalog, name: str, shape: tuple[int, ...], dtype: str, first: int, last: int
) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a stored tensor, converted to a dtype, row by row, in blocks, like `blocks_of` for
    tensors in memory. Any number of threads may call this; `CorruptError` if they are damaged or incomplete."""
    itemsize = ITEMSIZES[dtype]
    for start in range(first, last, BUFFER_BYTES):
        data = bytearray(min(BUFFER_BYTES, last - start))
        flat, filled = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]), 0
        for box in boxes_of_flat_range(shape, start // itemsize, (start + len(data)) // itemsize):
            out = flat[filled : filled + box.numel].view(box.shape)
            catalog.read([Part("model", name, box, out, f"model '{name}'")], num_threads=0)
            filled += box.numel
        for at in range(0, len(data), BLOCK):
            # A caller that batches writes after each chunk.
            yield memoryview(data)[at : at + BLOCK], at + BLOCK < len(data)
