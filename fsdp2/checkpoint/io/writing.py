"""Write planned files: bytes, their checksums, then the header. Layer: checkpoint.

The header is written last, so an incomplete file begins with zeros and is not a valid safetensors file. A storage
without renames needs the checksums first, so there the values are read twice, and files that exist already are not
written again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fsdp2.checkpoint.io.pieces import runs_within
from fsdp2.checkpoint.io.planned_files import Piece, PlannedFile, Sums, Written, named_by_content
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.schema.checksum import BLOCK, checksum
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.checkpoint.storage.local import LocalStorage, LocalWriter
from fsdp2.checkpoint.storage.remote import RemoteStorage
from fsdp2.placement.box import Box

__all__ = ["THREADS", "write_file"]

THREADS = 4
BATCH = 8 * BLOCK  # bytes that a thread checksums and writes at a time


def write_file(storage: Storage, folder: str, file: PlannedFile, report: Callable[[], None] = lambda: None) -> Written:
    """Write this rank's part of a file; return when it is durable.

    Args:
        report: called after each write, from several threads.

    Raises:
        OSError: the disk is full or not writable. The file is closed, but not removed.
    """
    if isinstance(storage, LocalStorage):
        return _write(storage, storage.join(folder, file.name), file, report)
    return _upload(storage, folder, file, report)


def _write(storage: LocalStorage, path: str, file: PlannedFile, report: Callable[[], None]) -> Written:
    sums: Sums = {}
    header = None
    writer = storage.write_file(path, file.size, file.shared)
    try:
        write = partial(_write_batch, writer, report)
        for of_lot in run_all(write, _batches(file), THREADS, "fsdp2-write"):
            for name, blocks in of_lot.items():
                sums.setdefault(name, []).extend(blocks)
        if file.header is not None:
            header = file.header(sums)
            writer.write(0, [memoryview(header)])
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return Written(file.name, file.size, None if header is None else checksum(header), sums)


def _upload(storage: RemoteStorage, folder: str, file: PlannedFile, report: Callable[[], None]) -> Written:
    """Write a file from its first byte to its last. This reads its values a second time."""
    assert file.header is not None and not file.shared
    sums = {piece.name: [checksum(view) for view, _ in piece.blocks(0, piece.nbytes)] for _, _, piece in file.pieces}
    header = file.header(sums)

    def content() -> Iterator[memoryview]:
        yield memoryview(header)
        for _, _, piece in file.pieces:
            yield from (view for view, _ in piece.blocks(0, piece.nbytes))

    name = named_by_content(file.name, header) if file.by_content else file.name
    path = storage.join(folder, name)
    if not file.by_content or storage.size(path) != file.size:
        storage.upload(path, content)
    report()
    return Written(name, file.size, checksum(header), sums)


# (offset of the container in the file, container, piece, first byte and end of a range of the piece).
Part = tuple[int, Box, Piece, int, int]


def _batches(file: PlannedFile) -> Iterator[list[Part]]:
    """The pieces of a file in batches of about `BATCH` bytes; large pieces are split."""
    lot: list[Part] = []
    filled = 0
    for offset, container, piece in file.pieces:
        for start in range(0, max(1, piece.nbytes), BATCH):
            end = min(piece.nbytes, start + BATCH)
            lot.append((offset, container, piece, start, end))
            filled += end - start
            if filled >= BATCH:
                yield lot
                lot, filled = [], 0
    if lot:
        yield lot


def _write_batch(writer: LocalWriter, report: Callable[[], None], lot: Sequence[Part]) -> Sums:
    """Checksum and write a batch. Adjacent views of plain memory become one write."""
    sums: Sums = {}
    run: list[memoryview] = []
    begin = end = 0
    for offset, container, piece, first, last in lot:
        blocks = sums.setdefault(piece.name, [])
        at = first
        for view, lasting in piece.blocks(first, last):
            blocks.append(checksum(view))
            for place, part in _places(offset, container, piece, at, view):
                if place != end:
                    writer.write(begin, run)
                    run, begin = [], place
                run.append(part)
                end = place + part.nbytes
            at += view.nbytes
            if not lasting:
                writer.write(begin, run)
                run, begin = [], end
    writer.write(begin, run)
    report()
    return sums


def _places(offset: int, container: Box, piece: Piece, at: int, view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where in the file the bytes of a view go. The view begins at byte `at` of the piece."""
    if piece.box is container:  # a rank's own file
        yield offset + at, view
        return
    filled = 0
    for place, size in runs_within(piece.box, container, ITEMSIZES[piece.dtype], at, at + view.nbytes):
        yield offset + place, view[filled : filled + size]
        filled += size
