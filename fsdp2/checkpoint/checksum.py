"""Checksums of blocks of bytes. Against accidents (a flipped bit, a file of another save), not against malice. Pure.

Every tensor of a file is cut into blocks of `BLOCK` bytes, the last one shorter; each has a checksum of fixed width, so
the length of a header is known before the data are. A reader that needs a part of a tensor reads whole blocks of it.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["ALGORITHMS", "BLOCK", "Checksum", "checksum_named", "num_blocks"]

BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview
Checksum = Callable[[Buffer], str]

# Name in a file -> hex digits a block.
ALGORITHMS = {"crc32": 8, "xxh3": 16}


def crc32(data: Buffer) -> str:
    """CRC-32 of the standard library (1.5-2 GB/s a core; the GIL is released)."""
    return f"{zlib.crc32(data):08x}"


def checksum_named(name: str) -> Checksum:
    """The function that computes a checksum as lower-case hex digits of fixed width.

    Args:
        name: "crc32", or "xxh3", which is several times as fast and needs ``pip install xxhash``.

    Raises:
        ArgumentError: another name.
        UnsupportedError: the library for it is not installed.
    """
    if name == "crc32":
        return crc32
    if name != "xxh3":
        raise ArgumentError(f"checksum: expected one of {', '.join(ALGORITHMS)}, got {name!r}")
    try:
        xxhash: Any = import_module("xxhash")
    except ImportError as error:
        raise UnsupportedError(
            "the checksums are of kind 'xxh3', for which the package xxhash is missing: pip install "
            "'fsdp2[xxhash]' (or, "
            "to read without checking, verify=False)"
        ) from error
    digest: Checksum = xxhash.xxh3_64_hexdigest
    return digest


def num_blocks(nbytes: int) -> int:
    """How many blocks, and so checksums, that many bytes have."""
    return -(-nbytes // BLOCK)
