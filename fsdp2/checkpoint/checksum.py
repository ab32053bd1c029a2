"""Checksums of blocks of bytes. Against accidents (a flipped bit, a file of another save), not against malice. Pure.

Every tensor of a file is cut into blocks of `BLOCK` bytes, the last one shorter; each has a checksum of fixed width, so
the length of a header is known before the data are. A reader that needs a part of a tensor reads whole blocks of it.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["ALGORITHMS", "BLOCK", "Checksum", "checksum_named", "num_blocks", "use_isal"]

BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview
Checksum = Callable[[Buffer], str]

# Name in a file -> hex digits a block.
ALGORITHMS = {"crc32": 8, "xxh3": 16}


# What computes CRC-32 in this process: see `use_isal`.
_crc32: Callable[[Buffer], int] = zlib.crc32


def crc32(data: Buffer) -> str:
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
