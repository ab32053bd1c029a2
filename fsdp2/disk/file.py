"""`DiskFile`: a file without a name, read and written with direct I/O. Layer: ground.

No other process can open it, and the system frees it when the process dies.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from fsdp2.disk.direct import PAGE, DirectFile, open_direct

PREFIX = ".fsdp2-offload-"
UNNAMED_AFTER = 60.0  # seconds after which a name must have come from a process that died


def in_turn(folders: Sequence[str], number: int) -> str:
    """The folder for the file with this number. The ranks of a machine start with different folders, because they make
    their files at the same time, in the same order."""
    return folders[(number + int(os.environ.get("LOCAL_RANK", "0"))) % len(folders)]


class DiskFile:
    """A file without a name. It disappears with this object.

    Args:
        nbytes: its size, which is reserved.
        what, so: its content, and the consequence or advice if it cannot be made; for the error message.

    Raises:
        OSError: the folder cannot be written to, or has no room. No file is left behind.
    """

    def __init__(self, folder: str, nbytes: int, what: str, so: str):
        self._fd = -1
        self._direct: DirectFile | None = None
        try:
            os.makedirs(folder, exist_ok=True)  # it looks empty, so a user may have removed it
            self._fd, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
            try:
                self._direct = open_direct(path, self._fd, os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.unlink(path)
            if nbytes and sys.platform == "linux":
                os.posix_fallocate(self._fd, 0, nbytes)
            else:
                os.ftruncate(self._fd, nbytes)
        except OSError as error:
            self.close()
            message = f"Offload: {nbytes} bytes of {what} could not be put on disk ({error.strerror}). {so}"
            raise OSError(error.errno, message, folder) from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close it, which frees its disk space."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._direct is not None:
            self._direct.close()

    def fill(self, offset: int, into: memoryview) -> None:
        """Read, with direct I/O if possible, from an offset that is a multiple of the page size."""
        if self._direct is None or not self._direct.read(offset, into):
            self.read(offset, into)

    def keep(self, offset: int, values: memoryview) -> None:
        """Write in the same way. The rest of the last page may be filled with zeros."""
        rest = memoryview(bytes(whole_pages(values.nbytes) - values.nbytes))
        if self._direct is None or not self._direct.write(offset, [values, rest]):
            self.write(offset, values)

    def read(self, offset: int, into: memoryview) -> None:
        """Read from any offset."""
        while into.nbytes:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise OSError(f"an offloaded file ends at byte {offset}, {into.nbytes} bytes too early")
            offset, into = offset + count, into[count:]

    def write(self, offset: int, values: memoryview) -> None:
        """Write at any offset."""
        while values.nbytes:
            count = os.pwritev(self._fd, [values], offset)
            offset, values = offset + count, values[count:]


@cache
def remove_leftovers(folder: str) -> None:
    """Create the folder, or remove files in it whose processes died before they could unlink them. Files of live
    processes only have a name for a moment."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in Path(folder).glob(PREFIX + "*"):
        with suppress(FileNotFoundError, PermissionError):
            if time.time() - path.stat().st_mtime > UNNAMED_AFTER:
                path.unlink()


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
