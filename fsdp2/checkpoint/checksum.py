"""Checksums of blocks of bytes. Against accidents (a flipped bit, a file of another save), not against malice. Pure.

Every tensor of a file is cut into blocks of `BLOCK` bytes, the last one shorter; each has a checksum of fixed width, so
the length of a header is known before the data are. A reader that needs a part of a tensor reads whole blocks of it.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["ALGORITHM", "BLOCK", "WIDTH", "checksum", "crc32", "num_blocks", "text_of"]

BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview

# Its name in a manifest, and its hex digits a block.
ALGORITHM = "crc32"
WIDTH = 8


def _fastest_crc32() -> Callable[[Buffer, int], int]:
    """Intel's ISA-L where the package isal is installed (the extra `fsdp2[isal]`), else the standard library's: the
    same values, several times as fast, so neither writing nor reading depends on which it is."""
    try:
        isal_zlib: Any = import_module("isal.isal_zlib")
    except ImportError:
        return zlib.crc32
    fastest: Callable[[Buffer, int], int] = isal_zlib.crc32
    return fastest


_crc32 = _fastest_crc32()


def crc32(data: Buffer, before: int = 0) -> int:
    """CRC-32, with the GIL released. zlib's does 1.5 to 2 GB/s a core, which is most of the work of a load of files
    that are in memory.

    Args:
        before: that of the bytes before these.
    """
    return _crc32(data, before)


def text_of(crc: int) -> str:
    """A checksum as it is stored."""
    return f"{crc:08x}"


def checksum(data: Buffer) -> str:
    """The checksum of a block."""
    return text_of(_crc32(data, 0))


def num_blocks(nbytes: int) -> int:
    """How many blocks, and so checksums, that many bytes have."""
    return -(-nbytes // BLOCK)
