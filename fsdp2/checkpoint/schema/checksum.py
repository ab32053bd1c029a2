"""Checksums of blocks of bytes. They detect accidents (a flipped bit, a file of another save), not malice. Pure.

Every tensor of a file is split into blocks of `BLOCK` bytes; the last one may be shorter. Each has a checksum of fixed
width, so the length of a header is known before the data. A reader that needs part of a tensor reads whole blocks.
"""

import zlib
from collections.abc import Callable
from importlib import import_module

__all__ = ["BLOCK", "WIDTH", "checksum", "crc32", "num_blocks", "text_of"]

BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview

WIDTH = 8  # hex digits of a block's checksum


def _fastest_crc32() -> Callable[..., int]:
    """Intel's ISA-L if the package isal is installed (the extra `fsdp2[isal]`), otherwise the standard library's
    function. Both give the same values, so files do not depend on the choice; ISA-L is several times as fast."""
    try:
        fastest: Callable[..., int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fastest


# Takes bytes, and the CRC-32 of the preceding ones. Releases the GIL. zlib's version, at 1.5 to 2 GB/s per core, takes
# most of the time of loading files that are in memory.
crc32 = _fastest_crc32()


def text_of(crc: int) -> str:
    """A checksum as it is stored."""
    return f"{crc:08x}"


def checksum(data: Buffer) -> str:
    """The checksum of a block."""
    return text_of(crc32(data))


def num_blocks(nbytes: int) -> int:
    """The number of blocks, and so of checksums, for `nbytes` bytes."""
    return -(-nbytes // BLOCK)
