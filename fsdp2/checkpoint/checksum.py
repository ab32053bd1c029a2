"""Checksums of blocks of bytes. Against accidents (a flipped bit, a file of another save), not against malice. Pure.

Every tensor of a file is cut into blocks of `BLOCK` bytes, the last one shorter; each has a checksum of fixed width, so
the length of a header is known before the data are. A reader that needs a part of a tensor reads whole blocks of it.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fsdp2.errors import UnsupportedError

__all__ = ["ALGORITHM", "BLOCK", "WIDTH", "checksum", "num_blocks", "use_isal"]

BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview

# Its name in a manifest, and its hex digits a block.
ALGORITHM = "crc32"
WIDTH = 8

# What computes CRC-32 in this process: see `use_isal`.
_crc32: Callable[[Buffer], int] = zlib.crc32


def checksum(data: Buffer) -> str:
    """CRC-32 as the standard library has it (1.5-2 GB/s a core; the GIL is released), or ISA-L."""
    return f"{_crc32(data):08x}"


def use_isal() -> None:
    """Compute CRC-32 with Intel's ISA-L from now on, in this process: the same values, several times as fast. Files do
    not depend on it, neither to be written nor to be read. Without it, checking is most of the work of a load of files
    that are in memory.

    Raises:
        UnsupportedError: the package isal is not installed.

    Example::

        fsdp2.checkpoint.use_isal()  # once, before saving and loading
    """
    global _crc32
    try:
        isal_zlib: Any = import_module("isal.isal_zlib")
    except ImportError as error:
        raise UnsupportedError("use_isal: the package isal is missing: pip install 'fsdp2[isal]'") from error
    _crc32 = isal_zlib.crc32


def num_blocks(nbytes: int) -> int:
    """How many blocks, and so checksums, that many bytes have."""
    return -(-nbytes // BLOCK)
