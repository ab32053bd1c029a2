"""Read parts of stored tensors into tensors, with several threads, bounded buffers, and checksums of every block.
Layer: checkpoint.

A part that is contiguous both in the file and in the tensor is read directly into place. Anything else (a column cut,
another dtype, an accelerator, the partial blocks at the ends) goes through the buffer of the thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local

import torch

from fsdp2.checkpoint.io.memory import bytes_of, is_plain_memory, new_buffer, part_of, uncollected, wait_for
from fsdp2.checkpoint.io.pieces import StoredPiece, runs_within
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.schema.checksum import BLOCK, WIDTH, checksum, crc32, text_of
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.storage.base import Reader, Storage
from fsdp2.disk.direct import memory_at
from fsdp2.errors import CorruptError
from fsdp2.layout import strides
from fsdp2.placement.box import Box, flat_range_within

__all__ = ["BUFFER_BYTES", "THREADS", "OpenFiles", "PieceBytes", "Request", "Window", "read_all"]

THREADS = 4
BUFFER_BYTES = 4 * BLOCK  # per thread
RUN = 16 * BLOCK  # bytes of one task, or of several small ones that one thread runs together
TOGETHER = 16  # the most tasks run together: for small ones in a remote storage, most of the time is latency
MAX_OPEN_FILES = 32
MAX_LINE = 1 << 16


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
    progress: Callable[[int], None] = lambda nbytes: None,
    num_threads: int = THREADS,
) -> None:
    """Fill all targets.

    Args:
        verify: check all blocks that are read.
        progress: is called with the number of bytes that were just filled, from several threads.
        num_threads: 0 reads in the calling thread, for callers that have their own threads.

    Raises:
            CorruptError: the checksum of a block is wrong; the message names file, tensor and bytes.
    """

    def run(lot: _Lot) -> None:
        progress(lot.run(files))

    lots = _lots(requests, verify)
    if num_threads:
        run_all(run, lots, num_threads, "fsdp2-read")
    for lot in () if num_threads else lots:
        run(lot)


@uncollected()
def _lots(requests: Sequence[Request], verify: bool) -> list["_Lot"]:
    """The work for requests. Neighbours in a file are read one after the other."""
    tasks = [task for request in requests for task in _tasks(request, verify)]
    lots: list[_Lot] = []
    room = 0
    for task in sorted(tasks, key=lambda task: task.place):
        if not lots or lots[-1].path != task.place[0] or len(lots[-1].tasks) == TOGETHER or task.nbytes > room:
            lots.append(_Lot(task.place[0], []))
            room = RUN
        lots[-1].tasks.append(task)
        room -= task.nbytes
    return lots


class _Buffers(local):
    """One buffer per thread, created at first use. It grows only if one item with its block needs more."""

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
        buffers: to read through, of each thread.
    """

    def __init__(self, storage: Storage):
        self.buffers = _Buffers()
        self._storage = storage
        self._files: dict[str, _OpenFile] = {}  # most recently used last
        self._lock = Lock()

    @contextmanager
    def use(self, path: str) -> Iterator[Reader]:
        """The file, open while the block runs; `CheckpointError` if it cannot be opened."""
        with self._lock:
            file = self._files.pop(path, None) or _OpenFile(self._storage.open_file(path))
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

    def close(self) -> None:
        """Close all files, which nothing may be reading any more."""
        for file in self._files.values():
            file.reader.close()
        self._files.clear()


class Window:
    """A part of a file as the file object that `zipfile` and `pickle` need. It is read block by block, as far as it is
    asked for: few requests to a remote storage, and a file may consist mostly of holes.

    Args:
        block: the bytes of a request.

    Attributes:
        limit: the most bytes that one read may take.
    """

    def __init__(self, reader: Reader, path: str, start: int, length: int, block: int, limit: int):
        self.path, self.start, self.length, self.limit = path, start, length, limit
        self._reader = reader
        self._size = block
        self._at = self._low = 0
        self._block = b""

    def seekable(self) -> bool:
        """`zipfile` calls this."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position of the next read."""
        self._at = offset + (0, self._at, self.length)[whence]
        if self._at < 0:
            raise ValueError("a position before the beginning")
        return self._at

    def read(self, count: int = -1) -> bytes:
        """The next bytes; fewer at the end."""
        at = self._at - self._low
        if at < 0 or count < 0 or at + count > len(self._block):
            left = max(self.length - self._at, 0)
            count = left if count < 0 else min(count, left)
            if count > self.limit:
                raise CorruptError(f"{self.path}: claims {count} bytes beside its tensors, more than is possible")
            self._low = min(self._at, max(self.length - self._size, 0))  # at the end all of the last block
            at = self._at - self._low
            content = bytearray(min(max(at + count, self._size), self.length - self._low))
            self._reader.read_into(self.start + self._low, memoryview(content))
            self._block = bytes(content)
        self._at += count
        return self._block[at : at + count]

    def readline(self) -> bytes:
        """The next bytes up to an end of line."""
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
            if len(line) > MAX_LINE:
                raise ValueError("a long name")
        return bytes(line)


@dataclass(slots=True)
class PieceBytes:
    """The row-major bytes of a piece's values, wherever they are in its file.

    Attributes:
        name: of the tensor, for messages.
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
        # This runs thousands of times per GB: what is the same for all chunks is looked up once.
        place, chunk, read_into = self._place(), reader.chunk, reader.read_into
        if place is None or chunk > BLOCK:
            self._read_blocks(reader, start, into)
            return
        for low in range(0, into.nbytes, BLOCK):
            high, crc = min(low + BLOCK, into.nbytes), 0
            for at in range(low, high, chunk):
                part = into[at : min(at + chunk, high)]
                read_into(place + start + at, part)
                crc = crc32(part, crc)
            self._check(start + low, start + high, text_of(crc))

    def _read_blocks(self, reader: Reader, start: int, into: memoryview) -> None:
        """The same where a request for bytes is expensive, or they are not contiguous."""
        step = max(reader.chunk, BLOCK)
        for at in range(0, into.nbytes, step):
            part = into[at : at + step]
            self.fetch(reader, start + at, part)
            for first, last, found, _ in self.bad_blocks(start + at, part):
                self._check(first, last, found)

    def _check(self, first: int, last: int, found: str) -> None:
        """Compare the checksum of a block with the stored one."""
        expected = self._sum_at(first)
        if found != expected:
            box = self.piece.box
            raise CorruptError(
                f"{self.piece.path}: '{self.name}' is damaged: bytes {first}..{last} of its part "
                f"{list(box.start)}..{list(box.end)} have checksum {found}, expected {expected}. Load an earlier "
                "checkpoint; python -m fsdp2.checkpoint verify lists all damage."
            )

    def _sum_at(self, start: int) -> str:
        """The stored checksum of the block that begins at `start`."""
        number = start // BLOCK
        return self.piece.sums[number * WIDTH : (number + 1) * WIDTH]

    def bad_blocks(self, start: int, data: memoryview) -> Iterator[tuple[int, int, str, str]]:
        """(first byte, end, checksum, stored checksum) of each damaged block in `data`, which are whole blocks that
        begin at `start`."""
        for at in range(0, data.nbytes, BLOCK):
            block = data[at : at + BLOCK]
            expected = self._sum_at(start + at)
            found = checksum(block)
            if found != expected:
                yield start + at, start + at + block.nbytes, found, expected


@dataclass(slots=True)
class _Lot:
    """Tasks of one file that a thread runs together, because handing over each small tensor takes longer than reading
    it."""

    path: str
    tasks: list["_Direct | _Copied"]

    def run(self, files: OpenFiles) -> int:
        """Run all. Returns the number of bytes that were filled."""
        with files.use(self.path) as reader:
            return sum(task.run(reader, files.buffers) for task in self.tasks)


@dataclass(slots=True)
class _Direct:
    """Bytes that are read directly into memory.

    Attributes:
        start: where they begin in the source.
        into: the destination.
    """

    source: PieceBytes
    start: int
    into: memoryview

    @property
    def place(self) -> tuple[str, int, int]:
        """(file, piece, byte), as a sort key that brings neighbours in a file together."""
        return self.source.piece.path, self.source.piece.offset, self.start

    @property
    def nbytes(self) -> int:
        return self.into.nbytes

    def run(self, reader: Reader, buffers: _Buffers) -> int:
        """Read whole blocks directly into place, and partial blocks at the ends through the buffer."""
        source, at, end = self.source, self.start, self.start + self.nbytes
        last = end if end == source.nbytes or not source.verify else end // BLOCK * BLOCK  # end of the direct part
        while at < end:
            low = at // BLOCK * BLOCK
            if at < last and (at == low or not source.verify):
                stop = last
                source.read(reader, at, self.into[at - self.start : stop - self.start])
            else:
                high = min(low + BLOCK, source.nbytes)
                stop = min(high, end)
                scratch = bytes_of(buffers.get(high - low, torch.device("cpu")))
                source.read(reader, low, scratch)
                self.into[at - self.start : stop - self.start] = scratch[at - low : stop - low]
            at = stop
        return self.nbytes


@dataclass(slots=True)
class _Copied:
    """A box whose elements are copied out of the buffer: only some columns of its rows are wanted, or it has another
    dtype or device.

    Attributes:
        box: the part of the whole tensor.
        first, last: the range of the source's bytes from its first to its last element, or the whole blocks around it.
    """

    source: PieceBytes
    request: Request
    box: Box
    first: int
    last: int

    @property
    def place(self) -> tuple[str, int, int]:
        return self.source.piece.path, self.source.piece.offset, self.first

    @property
    def nbytes(self) -> int:
        return self.last - self.first

    def run(self, reader: Reader, buffers: _Buffers) -> int:
        """Read the range, then copy the box out of it. Both fit into the buffer."""
        target, piece = self.request.target, self.source.piece
        if target.device.index is not None:  # a thread begins with the first device, and events make a context there
            torch.accelerator.set_device_index(target.device.index)
        buffer = buffers.get(self.last - self.first, target.device)
        data = bytes_of(buffer)
        self.source.read(reader, self.first, data)
        within, steps = self.box.within(piece.box), strides(piece.box.shape)
        begin = sum(at * step for at, step in zip(within.start, steps, strict=True))
        begin -= self.first // ITEMSIZES[piece.dtype]
        values = buffer.view(DTYPES[piece.dtype]).as_strided(self.box.shape, steps, begin)
        part_of(target, self.box.within(self.request.box)).copy_(values)
        # On an accelerator the last copy may still be running on this thread's stream (a target with gaps, another
        # dtype). The calling thread does not know that stream, and the buffer is reused next.
        wait_for({target.device})
        return self.box.numel * target.element_size()


def _tasks(request: Request, verify: bool) -> Iterator[_Direct | _Copied]:
    """The work for one request, in parts that several threads can share."""
    piece, target = request.piece, request.target
    box = request.box.intersect(piece.box)
    if box is None or not box.numel:
        return
    source = PieceBytes(request.name, piece, verify and bool(piece.sums))
    there, here = flat_range_within(box, request.box), flat_range_within(box, piece.box)
    if there is None or here is None or target.dtype != DTYPES[piece.dtype] or not is_plain_memory(target):
        for part in _split(box, piece, source.verify):
            yield _Copied(source, request, part, *_span(part, piece, source.verify))
        return
    itemsize = target.element_size()
    start, end = here[0] * itemsize, here[1] * itemsize
    memory = memory_at(target.data_ptr() + there[0] * itemsize, end - start)
    for at in range(start // RUN * RUN, end, RUN):
        low, high = max(at, start), min(at + RUN, end)
        yield _Direct(source, low, memory[low - start : high - start])


def _span(box: Box, piece: StoredPiece, verify: bool) -> tuple[int, int]:
    """The range of the piece's bytes from the first to the last one that a box needs."""
    itemsize = ITEMSIZES[piece.dtype]
    within, steps = box.within(piece.box), strides(piece.box.shape)
    first = sum(at * step for at, step in zip(within.start, steps, strict=True)) * itemsize
    last = sum((end - 1) * step for end, step in zip(within.end, steps, strict=True)) * itemsize + itemsize
    if verify:
        first, last = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
    return first, min(last, piece.box.numel * itemsize)


def _split(box: Box, piece: StoredPiece, verify: bool) -> Iterator[Box]:
    """The box in parts; the bytes to read for each fit into the buffer."""

    def fits(part: Box) -> bool:
        first, last = _span(part, piece, verify)
        return last - first <= BUFFER_BYTES

    return box.split_until(fits)
