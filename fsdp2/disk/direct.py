"""Reads and writes that bypass the page cache, with O_DIRECT. Ground layer.

A checkpoint is written once and usually never read, and optimizer state on disk is read once per step. In the page
cache they would evict what the trainer reads, and finding pages for them takes most of the CPU time. O_DIRECT requires
whole pages of page-aligned memory. So values are copied here too, but through the same few pages.
"""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = ["PAGE", "PIECE", "DirectFile", "memory_at", "open_direct"]

PAGE = mmap.PAGESIZE  # direct writes cover whole pages; partial ones go through the page cache
PIECE = 2 << 20  # bytes that a thread writes or reads at a time, and the size of each thread's buffer

# A file system may accept the flag but fail to open a file, or to write, with it.
REFUSALS = (errno.EINVAL, errno.ENOTSUP)


_FROM_HERE_ON = ctypes.c_char * (1 << 62)  # one type for all sizes: making one takes as long as planning a read


def memory_at(address: int, nbytes: int) -> memoryview:
    """A view of these bytes of memory. The caller must keep their owner alive."""
    return memoryview(_FROM_HERE_ON.from_address(address)).cast("B")[:nbytes]


def open_direct(path: str, opened: int, flags: int) -> "DirectFile | None":
    """Open the file at `path`, already open as `opened`, a second time for direct I/O, with `flags` for reading or
    writing. None if this is impossible or useless.

    Only for local disks: over a network each direct write would wait for the server's disk. Other file systems (NFS,
    overlays, memory) are recognised by the missing major device number.
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
    """Copy bytes, large amounts without the GIL: otherwise the trainer waits, for long if this thread is preempted."""
    if values.readonly or values.nbytes < PAGE:
        into[:] = values
    else:
        ctypes.memmove(_address(into), _address(values), values.nbytes)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# Free buffers, shared by all files, of which there may be hundreds: as many as threads have used at the same time.
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
    memory = mmap.mmap(-1, 2 * PIECE, flags=private)  # a large page has the size of a piece, and is aligned to it
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PIECE
    return memoryview(memory)[start : start + PIECE]


class DirectFile:
    """A file that is read and written in whole pages. Several threads may do so at the same time."""

    def __init__(self, fd: int):
        self._fd = fd
        self._refused = False

    def write(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Write the bytes of `parts` one after the other from the page-aligned `offset`. Their total must be a multiple
        of the page size.

        Returns:
            False if the file system does not support it; the caller must then write them in another way.
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
        """Fill `into` with the bytes from the page-aligned `offset`. The file must contain the whole last page.

        Returns:
            False if the file system does not support it; the caller must then read them in another way.
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
        """A buffer for the block. If the file system rejects the block's I/O, this ends the block and is recorded."""
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
