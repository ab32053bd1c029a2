"""Checksums of blocks: known values, and a faster library that must give the same."""

import sys
import zlib

import pytest

from fsdp2.checkpoint.schema import checksum as module
from fsdp2.checkpoint.schema.checksum import BLOCK, WIDTH, checksum


def test_crc32_is_the_one_of_everybody() -> None:
    """The check value of CRC-32/ISO-HDLC: other programs can verify our files."""
    assert checksum(b"123456789") == "cbf43926"
    assert checksum(memoryview(b"")) == "0" * WIDTH


def test_isal_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("isal")
    assert module.crc32 is not zlib.crc32, "it is installed, and not used"
    blocks = [bytes(size % 251 for size in range(length)) for length in (0, 1, 63, 4096, BLOCK)]
    found = [checksum(block) for block in blocks]
    monkeypatch.setattr(module, "crc32", zlib.crc32)
    assert [checksum(block) for block in blocks] == found


def test_without_it_the_standard_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert module._fastest_crc32() is zlib.crc32
