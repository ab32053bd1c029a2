"""Checksums of blocks: known values, and faster libraries that must give the same."""

from __future__ import annotations

import sys

import pytest

from fsdp2.checkpoint import checksum
from fsdp2.checkpoint.checksum import ALGORITHMS, BLOCK, checksum_named, num_blocks, use_isal
from fsdp2.errors import ArgumentError, UnsupportedError


def test_crc32_is_the_one_of_everybody() -> None:
    """The check value of CRC-32/ISO-HDLC: other programs can verify our files."""
    digest = checksum_named("crc32")
    assert digest(b"123456789") == "cbf43926"
    assert digest(memoryview(b"")) == "0" * ALGORITHMS["crc32"]


def test_isal_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("isal")
    monkeypatch.setattr(checksum, "_crc32", checksum._crc32)  # undone at the end
    blocks = [bytes(size % 251 for size in range(length)) for length in (0, 1, 63, 4096, BLOCK)]
    before = [checksum.crc32(block) for block in blocks]
    use_isal()
    assert checksum._crc32 is not __import__("zlib").crc32
    assert [checksum.crc32(block) for block in blocks] == before


@pytest.mark.parametrize(("module", "call"), [("isal", use_isal), ("xxhash", lambda: checksum_named("xxh3"))])
def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch, module: str, call: object) -> None:
    """What is missing is an error that says what to install, never another checksum in silence."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.isal_zlib", None)
    assert callable(call)
    with pytest.raises(UnsupportedError, match=rf"pip install 'fsdp2\[{module}\]'"):
        call()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="crc32, xxh3"):
        checksum_named("md5")


def test_number_of_blocks() -> None:
    assert [num_blocks(size) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
