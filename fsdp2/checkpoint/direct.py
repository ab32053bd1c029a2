"""Write past the page cache, with O_DIRECT. Layer: checkpoint.

A checkpoint is written once and, mostly, never read. In the page cache it takes the place of what the trainer reads,
and to find pages for it is most of a save's processor time. Past it the disk takes whole pages only, out of memory that
begins at one; so values are copied here, too, but into the same few pages.
"""

import errno
import mmap
import os
import sys
from collections.abc import Sequence

__all__ = ["PAGE", "PIECE", "DirectFile", "open_direct"]

PAGE = mmap.PAGESIZE  # a whole one: the page cache keeps the others, of which this must not overwrite a part
PIECE = 2 << 20  # bytes that a thread gives to the disk at a time, and the memory that this takes for each thread

# A file system that knows the flag may still refuse it, or a write with it.
REFUSALS = (errno.EINVAL, errno.ENOTSUP)


def open_direct(path: str, opened: int, flags: int) -> "DirectFile | None":
    """The file that is open as `opened` once more, for writing without the page cache; None where that is no gain.

    Only on a disk of this machine: other file systems (NFS, overlays, memory) have no device, by its number, and over a
    network each direct write would wait for the server's disk.
    """
    here = os.fstat(opened)
    if sys.platform != "linux" or not os.major(here.st_dev):
        return None
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | flags)
    except OSError as error:
        if error.errno in REFUSALS:
            return None
        raise
    if not os.path.samestat(os.fstat(fd), here):
        os.close(fd)
        return None
    return DirectFile(fd)


class DirectFile:
    """Whole pages of a file. Several threads may write at the same time."""

    def __init__(self, fd: int):
        self._fd = fd
        self._refused = False
        self._buffers: list[memoryview] = []  # of which no thread is using any; at most one for each thread

    def write(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Write these bytes, which are whole pages, one after the other from `offset`, which is a page's.

        Returns:
            False if the file system refuses: then they are to be written otherwise.
        """
        if self._refused:
            return False
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, PIECE))  # begins at a page, and is the kernel's again once nobody has it
        filled = 0
        try:
            for part in parts:
                while part.nbytes:
                    taken = part[: PIECE - filled]
                    buffer[filled : filled + taken.nbytes] = taken
                    filled += taken.nbytes
                    part = part[taken.nbytes :]
                    if filled == PIECE:
                        self._write_whole(offset, buffer)
                        offset += filled
                        filled = 0
            self._write_whole(offset, buffer[:filled])
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._refused = True
            return False
        finally:
            self._buffers.append(buffer)
        return True

    def _write_whole(self, offset: int, values: memoryview) -> None:
        while values.nbytes:
            written = os.pwritev(self._fd, [values], offset)
            if not written:
                raise OSError(errno.EIO, "nothing could be written")
            offset += written
            values = values[written:]

    def close(self) -> None:
        """Release it. What was written is durable after an `fsync`, of this file by any descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
