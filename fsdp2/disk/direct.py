"""Write and read past the page cache, with O_DIRECT. Ground layer.

A checkpoint is written once and mostly never read, and the state of an optimizer on disk is read once each step. In the
page cache they evict what the trainer reads, and finding pages for them takes most of the CPU time. With O_DIRECT the
disk only takes whole pages, of page-aligned memory. Values are copied here too, but through the same few pages.
"""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = ["PAGE", "PIECE", "DirectFile", "memory_at", "open_direct"]

PAGE = mmap.PAGESIZE  # direct writes cover whole pages: partial ones go through the page cache
PIECE = 2 << 20  # bytes that a thread writes or reads at a time, and the size of each thread's buffer

# A file system may accept the flag but refuse to open a file, or to write, with it.
REFUSALS = (errno.EINVAL, errno.ENOTSUP)


_FROM_HERE_ON = ctypes.c_char * (1 << 62)  # one type for all sizes: making one takes as long as planning a read


def memory_at(address: int, nbytes: int) -> memoryview:
    """These bytes of memory, whose owner the caller keeps alive."""
    return memoryview(_FROM_HERE_ON.from_address(address)).cast("B")[:nbytes]


def open_direct(path: str, opened: int, flags: int) -> "DirectFile | None":
    """Open the file at `path`, already open as `opened`, again past the page cache, with `flags` (that say whether for
    reading or writing). None if that is not possible or of no use.

    Only for local disks: other file systems (NFS, overlays, memory) have no major device number, and over a network
    each direct write would wait for the server's disk.
    """
    here = os.fstat(opened)
    if sys.platform != "linux" or not os.major(here.st_dev):
        return None
    try:
        fd = os.open(path, os.O_DIRECT | flags)
    except OSError as error:
        if error.errno in REFUSALS:
            return None
        raise
    if not os.path.samestat(os.fstat(fd), here):
        os.close(fd)
        return None
    return DirectFile(fd)


def _copy(into: memoryview, values: memoryview) -> None:
    """Copy bytes; many without the GIL, for which the trainer would wait, for long if this thread is preempted."""
    if values.readonly or values.nbytes < PAGE:
        into[:] = values
    else:
        ctypes.memmove(_address(into), _address(values), values.nbytes)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# Not in use by any thread; as many as threads have used at a time, for all files, of which there may be hundreds.
_buffers: list[memoryview] = []


def _buffer() -> memoryview:
    try:
        buffer = _buffers.pop()
    except IndexError:
        buffer = memoryview(b"")
    return buffer if buffer.nbytes == PIECE else _new_buffer()


def _new_buffer() -> memoryview:
    """Memory for one piece, in one large page where the system has them: with small ones the disk was a third as
    fast (docs/decisions.md). It is unmapped when it is unreferenced."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 2 * PIECE, flags=private)  # large pages are as large as a piece, and begin at multiples
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PIECE
    return memoryview(memory)[start : start + PIECE]


class DirectFile:
    """A file of which whole pages are written and read. Several threads may do so at the same time."""

    def __init__(self, fd: int):
        self._fd = fd
        self._refused = False

    def write(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Write the bytes of `parts` one after the other from `offset`, which is page-aligned. Their total is a
        multiple of the page size.

        Returns:
            False if the file system refuses; the caller must then write them in another way.
        """
        if self._refused:
            return False
        with self._buffer() as buffer:
            filled = 0
            for part in parts:
                while part.nbytes:
                    taken = part[: PIECE - filled]
                    _copy(buffer[filled : filled + taken.nbytes], taken)
                    filled += taken.nbytes
                    part = part[taken.nbytes :]
                    if filled == PIECE:
                        self._write_whole(offset, buffer)
                        offset += filled
                        filled = 0
            self._write_whole(offset, buffer[:filled])
        return not self._refused

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into` with the bytes from `offset`, which is page-aligned. The file has the whole of the last page.

        Returns:
            False if the file system refuses; the caller must then read them in another way.
        """
        if self._refused:
            return False
        with self._buffer() as buffer:
            while into.nbytes:
                wanted = min(PIECE, -(-into.nbytes // PAGE) * PAGE)
                count = min(os.preadv(self._fd, [buffer[:wanted]], offset), into.nbytes)
                if not count:
                    raise OSError(errno.EIO, f"the file ends at byte {offset}, {into.nbytes} bytes too early")
                _copy(into[:count], buffer[:count])
                offset, into = offset + count, into[count:]
        return not self._refused

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """A buffer for the block; notes if the file system refuses what the block does, which ends it."""
        buffer = _buffer()
        try:
            yield buffer
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._refused = True
        finally:
            _buffers.append(buffer)

    def _write_whole(self, offset: int, values: memoryview) -> None:
        while values.nbytes:
            written = os.pwritev(self._fd, [values], offset)
            if not written:
                raise OSError(errno.EIO, "nothing could be written")
            offset += written
            values = values[written:]

    def close(self) -> None:
        """Close it. What was written is durable after an `fsync` of the file through any descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
