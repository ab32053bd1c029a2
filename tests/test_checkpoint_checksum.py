"""Checksums of blocks: known values, and a faster library that must give the same."""

from __future__ import annotations

import sys
import zlib

import pytest

from fsdp2.checkpoint import checksum as module
from fsdp2.checkpoint.checksum import BLOCK, WIDTH, checksum, num_blocks, use_isal
from fsdp2.errors import UnsupportedError


def test_crc32_is_the_one_of_everybody() -> None:
    """The check value of CRC-32/ISO-HDLC: other programs can verify our files."""
    assert checksum(b"123456789") == "cbf43926"
    assert checksum(memoryview(b"")) == "0" * WIDTH


def test_isal_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("isal")
    monkeypatch.setattr(module, "_crc32", zlib.crc32)  # undone at the end
    blocks = [bytes(size % 251 for size in range(length)) for length in (0, 1, 63, 4096, BLOCK)]
    before = [checksum(block) for block in blocks]
    use_isal()
    assert module._crc32 is not zlib.crc32
    assert [checksum(block) for block in blocks] == before


def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is an error that says what to install, never something else in silence."""
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'fsdp2\[isal\]'"):
        use_isal()


def test_number_of_blocks() -> None:
    assert [num_blocks(size) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
