"""Read parts of stored tensors into tensors, with several threads, bounded buffers, and checksums of every block.
Layer: checkpoint.

A part that is contiguous both in the file and in the tensor is read directly into place. Anything else (a split along
columns, another dtype, an accelerator, partial blocks at the ends) goes through the thread's buffer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, local

import torch

from fsdp2.checkpoint.io.memory import bytes_of, is_plain_memory, new_buffer, part_of, uncollected, wait_for
from fsdp2.checkpoint.io.pieces import StoredPiece, runs_within
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.schema.checksum import BLOCK, WIDTH, crc32, text_of
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.storage.base import Reader, Storage
from fsdp2.disk.direct import memory_at
from fsdp2.errors import CheckpointError, CorruptError
from fsdp2.layout import strides
from fsdp2.placement.box import Box, flat_range_within

__all__ = ["BUFFER_BYTES", "THREADS", "OpenFiles", "PieceBytes", "Request", "read_all"]

THREADS = 4
BUFFER_BYTES = 4 * BLOCK  # per thread; verify and convert read a tensor in chunks of this size
RUN = 16 * BLOCK  # bytes of one task, or of several small ones that one thread runs together
TOGETHER = 16  # the most tasks run together: small ones in a remote storage take mostly latency
MAX_OPEN_FILES = 32


@dataclass(slots=True)
class Request:
    """A part of a tensor to fill from a piece.

    Attributes:
        name: for messages.
        target: a plain tensor on any device.
        box: the part of the whole tensor that `target` is.
    """

    name: str
    target: torch.Tensor
    box: Box
    piece: StoredPiece


def read_all(
    files: "OpenFiles",
    requests: Sequence[Request],
    verify: bool = True,
    num_threads: int = THREADS,
) -> None:
    """Fill all targets.

    Args:
        verify: check all blocks that are read.
        num_threads: 0 reads in the calling thread, for callers that have their own threads.

    Raises:
        CorruptError: the checksum of a block is wrong; the message names file, tensor and bytes.
    """
    lots = _lots(requests, verify)
    if num_threads:
        run_all(partial(_run, files), lots, num_threads, "fsdp2-read")
    for lot in () if num_threads else lots:
        _run(files, lot)


@uncollected()
def _lots(requests: Sequence[Request], verify: bool) -> list[list["_Task"]]:
    """The work for requests. Neighbours in a file are read one after the other. A thread runs small tasks of one file
    together, because passing one to a thread takes longer than reading it."""
    tasks = [task for request in requests for task in _tasks(request, verify)]
    lots: list[list[_Task]] = []
    room = 0
    for task in sorted(tasks, key=lambda task: task.place):
        if not lots or lots[-1][0].path != task.path or len(lots[-1]) == TOGETHER or task.nbytes > room:
            lots.append([])
            room = RUN
        lots[-1].append(task)
        room -= task.nbytes
    return lots


def _run(files: "OpenFiles", lot: Sequence["_Task"]) -> None:
    with files.use(lot[0].path) as reader:
        for task in lot:
            task.run(reader, files.buffers)


class _Buffers(local):
    """One buffer per thread, created at first use. It grows only if a single item needs more."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def get(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._buffer.numel() < nbytes:
            self._buffer = new_buffer(max(nbytes, BUFFER_BYTES), device)
        return self._buffer[:nbytes]


@dataclass
class _OpenFile:
    """An open file, and how many threads are reading it."""

    reader: Reader
    users: int = 0


class OpenFiles:
    """Files by path, for several threads. The `MAX_OPEN_FILES` most recently used stay open: a checkpoint of many ranks
    has more files than a process may have open.

    Attributes:
        buffers: the read buffer of each thread.
    """

    def __init__(self, storage: Storage):
        self.buffers = _Buffers()
        self._storage = storage
        self._files: dict[str, _OpenFile] = {}  # most recently used last
        self._known: dict[str, object] = {}  # path -> identity
        self._lock = Lock()

    @contextmanager
    def use(self, path: str) -> Iterator[Reader]:
        """The file, open while the block runs; `CheckpointError` if it cannot be opened."""
        with self._lock:
            file = self._files.pop(path, None) or self._opened(path)
            file.users += 1
            self._files[path] = file
        try:
            yield file.reader
        finally:
            with self._lock:
                file.users -= 1
                idle = [path for path, other in self._files.items() if not other.users]
                for path in idle[: max(0, len(self._files) - MAX_OPEN_FILES)]:
                    self._files.pop(path).reader.close()

    def _opened(self, path: str) -> _OpenFile:
        reader = self._storage.open_file(path)
        if self._known.setdefault(path, reader.identity) != reader.identity:
            reader.close()
            raise CheckpointError(f"{path}: is no longer the file that was opened before")
        return _OpenFile(reader)

    def close(self) -> None:
        """Close all files, which nothing may be reading any more."""
        for file in self._files.values():
            file.reader.close()
        self._files.clear()


@dataclass(slots=True)
class PieceBytes:
    """The row-major bytes of a piece's values, wherever they are in its file.

    Attributes:
        name: the tensor's name, for messages.
        verify: check the blocks that are read.
    """

    name: str
    piece: StoredPiece
    verify: bool

    @property
    def nbytes(self) -> int:
        """Their number."""
        return self.piece.box.numel * ITEMSIZES[self.piece.dtype]

    def _place(self) -> int | None:
        """Where they begin in the file, if they are contiguous there."""
        place = flat_range_within(self.piece.box, self.piece.container)
        return None if place is None else self.piece.offset + place[0] * ITEMSIZES[self.piece.dtype]

    def fetch(self, reader: Reader, start: int, into: memoryview) -> None:
        """Read bytes from `start`; in a consolidated file they may not be contiguous."""
        piece, filled, end = self.piece, 0, start + into.nbytes
        for place, size in runs_within(piece.box, piece.container, ITEMSIZES[piece.dtype], start, end):
            reader.read_into(piece.offset + place, into[filled : filled + size])
            filled += size

    def read(self, reader: Reader, start: int, into: memoryview) -> None:
        """Read bytes from `start`: any range, or with `verify` whole blocks. Checksums are computed while the bytes are
        still in the processor's cache.

        Raises:
            CorruptError: the checksum of a block is wrong.
        """
        if not self.verify:
            self.fetch(reader, start, into)
            return
        # This runs thousands of times per GB, so look up once what is the same for all chunks.
        place, chunk, read_into = self._place(), reader.chunk, reader.read_into
        step = max(chunk, BLOCK)
        for low in range(0, into.nbytes, step):
            if place is None or chunk > BLOCK:  # the bytes are not contiguous, or each request is expensive
                self.fetch(reader, start + low, into[low : low + step])
            for first in range(low, min(low + step, into.nbytes), BLOCK):
                block, crc = into[first : first + BLOCK], 0
                if place is None or chunk > BLOCK:
                    crc = crc32(block)
                else:
                    for at in range(0, block.nbytes, chunk):
                        part = block[at : at + chunk]
                        read_into(place + start + first + at, part)
                        crc = crc32(part, crc)
                self._check(start + first, block.nbytes, text_of(crc))

    def _check(self, first: int, nbytes: int, found: str) -> None:
        """Compare the checksum of a block with the stored one."""
        number = first // BLOCK
        expected = self.piece.sums[number * WIDTH : (number + 1) * WIDTH]
        if found != expected:
            box = self.piece.box
            raise CorruptError(
                f"{self.piece.path}: '{self.name}' is damaged: bytes {first}..{first + nbytes} of its part "
                f"{list(box.start)}..{list(box.end)} have checksum {found}, expected {expected}. Load an earlier "
                "checkpoint."
            )


@dataclass(slots=True)
class _Task:
    """Bytes ``first..last`` of a source, for a part of its tensor.

    Attributes:
        into: where they go, if they are contiguous both here and in the file.
        box: otherwise, the part to copy out of the buffer (some columns of the rows, another dtype or device). Then the
            range fits into the buffer, and consists of whole blocks.
    """

    source: PieceBytes
    request: Request
    first: int
    last: int
    into: memoryview | None = None
    box: Box | None = None

    @property
    def path(self) -> str:
        return self.source.piece.path

    @property
    def place(self) -> tuple[str, int, int]:
        """(file, piece, byte), as a sort key that brings neighbours in a file together."""
        return self.path, self.source.piece.offset, self.first

    @property
    def nbytes(self) -> int:
        return self.last - self.first

    def run(self, reader: Reader, buffers: _Buffers) -> None:
        """Read."""
        if self.into is not None:
            self._read_into(self.into, reader, buffers)
            return
        assert self.box is not None
        target, piece = self.request.target, self.source.piece
        if target.device.index is not None:  # a thread starts with device 0, and events would create a context there
            torch.accelerator.set_device_index(target.device.index)
        buffer = buffers.get(self.nbytes, target.device)
        self.source.read(reader, self.first, bytes_of(buffer))
        steps = strides(piece.box.shape)
        begin = _offset(self.box.within(piece.box).start, steps) - self.first // ITEMSIZES[piece.dtype]
        values = buffer.view(DTYPES[piece.dtype]).as_strided(self.box.shape, steps, begin)
        part_of(target, self.box.within(self.request.box)).copy_(values)
        # On an accelerator the last copy may still be running on this thread's stream (a target with gaps, another
        # dtype). The calling thread does not wait for that stream, and the buffer is reused next.
        wait_for({target.device})

    def _read_into(self, into: memoryview, reader: Reader, buffers: _Buffers) -> None:
        """Read whole blocks directly into place, and partial blocks at the ends through the buffer."""
        source, at, end = self.source, self.first, self.last
        last = end if end == source.nbytes or not source.verify else end // BLOCK * BLOCK  # end of the direct part
        while at < end:
            low = at // BLOCK * BLOCK
            if at < last and (at == low or not source.verify):
                stop = last
                source.read(reader, at, into[at - self.first : stop - self.first])
            else:
                high = min(low + BLOCK, source.nbytes)
                stop = min(high, end)
                scratch = bytes_of(buffers.get(high - low, torch.device("cpu")))
                source.read(reader, low, scratch)
                into[at - self.first : stop - self.first] = scratch[at - low : stop - low]
            at = stop


def _tasks(request: Request, verify: bool) -> Iterator[_Task]:
    """The work for one request, in parts that several threads can share."""
    piece, target = request.piece, request.target
    box = request.box.intersect(piece.box)
    if box is None or not box.numel:
        return
    source = PieceBytes(request.name, piece, verify and bool(piece.sums))
    there, here = flat_range_within(box, request.box), flat_range_within(box, piece.box)
    if there is None or here is None or target.dtype != DTYPES[piece.dtype] or not is_plain_memory(target):
        span = partial(_span, piece=piece, verify=source.verify)
        for part in box.split_until(lambda part: span(part)[1] - span(part)[0] <= BUFFER_BYTES):
            yield _Task(source, request, *span(part), box=part)
        return
    itemsize = target.element_size()
    start, end = here[0] * itemsize, here[1] * itemsize
    memory = memory_at(target.data_ptr() + there[0] * itemsize, end - start)
    for at in range(start // RUN * RUN, end, RUN):
        low, high = max(at, start), min(at + RUN, end)
        yield _Task(source, request, low, high, into=memory[low - start : high - start])


def _span(box: Box, piece: StoredPiece, verify: bool) -> tuple[int, int]:
    """The range of the piece's bytes from the first to the last one that a box needs."""
    itemsize = ITEMSIZES[piece.dtype]
    within, steps = box.within(piece.box), strides(piece.box.shape)
    first = _offset(within.start, steps) * itemsize
    last = _offset([end - 1 for end in within.end], steps) * itemsize + itemsize
    if verify:
        first, last = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
    return first, min(last, piece.box.numel * itemsize)


def _offset(at: Sequence[int], steps: Sequence[int]) -> int:
    return sum(index * step for index, step in zip(at, steps, strict=True))
