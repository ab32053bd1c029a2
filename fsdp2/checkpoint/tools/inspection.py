"""Check a checkpoint completely: read every byte. Layer: checkpoint.

This checks what a load would check, with the same code, so that a checkpoint that passes can be loaded: the manifest,
the files that it lists, their headers, the completeness of each tensor, and the checksum of every block.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import bytes_of
from fsdp2.checkpoint.io.reading import BUFFER_BYTES, THREADS, OpenFiles, PieceBytes
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.opening import not_replaced, open_catalog
from fsdp2.checkpoint.run.folders import TRIES
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import ReplacedError
from fsdp2.placement.box import whole

__all__ = ["Report", "verify"]


@dataclass
class Report:
    """The result of `verify`.

    Attributes:
        kind: the format.
        num_tensors: the number of tensors checked.
        left_out: content that this library does not read -> why.
        checked_bytes: bytes of values that match their checksums.
        unchecked_bytes: bytes of values without checksums (other formats): readable, but perhaps wrong.
    """

    folder: str
    kind: str
    num_tensors: int
    left_out: dict[str, str]
    checked_bytes: int = 0
    unchecked_bytes: int = 0


def verify(folder: Folder) -> Report:
    """Read a checkpoint completely, in bounded memory with several threads.

    Args:
        folder: the folder of a checkpoint in any format that `load` supports. Formats without checksums are only read.

    Raises:
        CorruptError: it is damaged; the message names the first file, tensor and bytes that are wrong.
        CheckpointError: it is not a checkpoint.
        ReplacedError: in each of several attempts it was replaced while it was read.

    Example::

        good = fsdp2.checkpoint.latest("runs/a", valid=fsdp2.checkpoint.verify)
    """
    storage, path = storage_of(folder)
    for _ in range(TRIES - 1):
        with suppress(ReplacedError):
            return _verified(storage, path)
    return _verified(storage, path)


def _verified(storage: Storage, path: str) -> Report:
    with closing(open_catalog(storage, path)) as catalog, not_replaced(storage, path, catalog):
        report = Report(catalog.path, catalog.kind, sum(map(len, catalog.tensors.values())), catalog.left_out_texts())
        if isinstance(catalog, NativeCatalog):
            for file in catalog.manifest.files:
                (catalog.json_of if file.endswith(".json") else catalog.header_of)(file)
        run_all(partial(_read, catalog.opened), _chunks(catalog, report), THREADS, "fsdp2-verify")
    return report


def _chunks(catalog: Catalog, report: Report) -> Iterator[tuple[PieceBytes, int, int]]:
    """(piece, first byte, end) of everything to read, which is counted in the report."""
    for source in _pieces(catalog):
        report.checked_bytes += source.nbytes * source.verify
        report.unchecked_bytes += source.nbytes * (not source.verify)
        for start in range(0, source.nbytes, BUFFER_BYTES):
            yield source, start, min(start + BUFFER_BYTES, source.nbytes)


def _pieces(catalog: Catalog) -> Iterator[PieceBytes]:
    """All parts of all tensors, including the extra state."""
    for section, infos in catalog.tensors.items():
        for name, info in infos.items():
            for piece in catalog.covering(section, name, whole(info.shape)):
                yield PieceBytes(f"{section} '{name}'", piece, bool(piece.sums))
    if isinstance(catalog, NativeCatalog):
        for key, shares in catalog.extra.items():
            for file in dict.fromkeys(str(share["file"]) for share in shares):
                for piece in catalog.extra_pieces(file, key):
                    yield PieceBytes(f"extra '{key}'", piece, True)


def _read(files: OpenFiles, chunk: tuple[PieceBytes, int, int]) -> None:
    """Read some bytes (first to end) of a piece as a load does."""
    source, first, end = chunk
    with files.use(source.piece.path) as reader:
        source.read(reader, first, bytes_of(files.buffers.get(end - first, torch.device("cpu"))))
