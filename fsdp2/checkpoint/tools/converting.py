"""Convert the model of a checkpoint of any format to whole tensors, with Hugging Face's index. Layer: checkpoint.

One process does this, without a GPU. It is a consolidated save of one rank, whose values are read from the old
checkpoint in chunks, so a tensor larger than a few chunks is never completely in memory.
"""

import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import torch

from fsdp2.checkpoint.io.catalog import Catalog, Part
from fsdp2.checkpoint.io.planned_files import Homes, Piece, consolidated_homes
from fsdp2.checkpoint.io.reading import BUFFER_BYTES
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.ranks.agreement import Agreement
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.run.folders import free_name
from fsdp2.checkpoint.saving import Job, SaveOptions
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES, name_of
from fsdp2.checkpoint.schema.manifest import table_of
from fsdp2.checkpoint.storage.base import Folder, storage_of
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
    ``max_file_bytes``. Call this in one process; no process group is needed.

    The values stay bitwise the same (except with `dtype`), and tied names and the step are kept. The result is a
    checkpoint of the model only, without optimizer and extra state. The source is unchanged.

    Args:
        source: any checkpoint that `load` supports. Its checksums, if it has any, are checked.
        target: a folder that does not exist yet.
        dtype: convert the floating point tensors to this.
        max_file_bytes: as for `save`.
        overwrite: as for `save`.

    Returns:
        The new folder.

    Raises:
        ArgumentError: an option is invalid.
        CheckpointError: `source` is not a checkpoint, or something exists at `target`.
        CorruptError: the source is damaged. The new folder is removed (in an object store, files may stay).
        UnsupportedError: the model has something that cannot be read; `describe` lists it.

    Example::

        fsdp2.checkpoint.convert("runs/a/step-00001000", "export")
    """
    options = SaveOptions(True, max_file_bytes, overwrite, timeout_s=600.0)
    to = None if dtype is None else name_of(dtype)
    if dtype is not None and to not in FLOATS:
        raise ArgumentError(f"convert: expected a floating-point dtype of 16 bits or more, got {dtype}")
    storage, path = storage_of(target)
    free_name(storage, path, overwrite)
    if not storage.renames and storage.names(path):
        raise CheckpointError(f"{path}: has files in it; convert to another folder, or delete what is there")
    with closing(open_catalog(*storage_of(source))) as catalog:
        rows = _rows(catalog, to)
        homes: Homes = {"model": consolidated_homes("model", rows, max_file_bytes)}
        tilings = {"model": {name: (kind, replicated(shape, (0,))) for name, (kind, shape) in rows.items()}}
        values = {name: value for table in catalog.values.get("model", ()) for name, value in table.items()}
        table = table_of(tilings, {"model": catalog.aliases.get("model", {})}, {"model": values})
        alone = World(0, (0,))
        agreement = Agreement("convert", alone, None, options.timeout_s)
        job = Job(storage, path, catalog.step, alone, agreement, options)
        pieces = {"model": [_piece(catalog, name, *row) for name, row in rows.items()]}
        job.run(uuid.uuid4().hex[:12], {"table": table, "sums": {}}, pieces, [], homes)
    return path


def _rows(catalog: Catalog, to: str | None) -> Rows:
    """The tensors to write. Checks before anything is written that nothing is lost, and that all parts exist."""
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


def _piece(catalog: Catalog, name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """A piece whose values come from the old checkpoint."""
    empty = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    return Piece(name, dtype, whole(shape), empty, shape, partial(_stored_blocks, catalog, name, shape, dtype))


def _stored_blocks(
    catalog: Catalog, name: str, shape: tuple[int, ...], dtype: str, first: int, last: int
) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a stored tensor, converted to a dtype, row by row, in blocks, like `blocks_of` for
    tensors in memory. Any number of threads may call this. `CorruptError` if the bytes are damaged or incomplete."""
    itemsize = ITEMSIZES[dtype]
    for start in range(first, last, BUFFER_BYTES):
        data = bytearray(min(BUFFER_BYTES, last - start))
        flat, filled = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]), 0
        for box in boxes_of_flat_range(shape, start // itemsize, (start + len(data)) // itemsize):
            out = flat[filled : filled + box.numel].view(box.shape)
            catalog.read([Part("model", name, box, out, f"model '{name}'")], num_threads=0)
            filled += box.numel
        for at in range(0, len(data), BLOCK):
            # False at the end of a chunk, so that a caller that batches writes now, and few chunks are in memory.
            yield memoryview(data)[at : at + BLOCK], at + BLOCK < len(data)
