"""Reading in chunks: blocks are checked right, however many bytes a storage wants to be asked for at a time."""

from dataclasses import replace

import pytest
import torch

from fsdp2.checkpoint.io import reading
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.io.reading import OpenFiles, Request, read_all
from fsdp2.checkpoint.schema.checksum import checksum
from fsdp2.checkpoint.storage.local import LocalReader, LocalStorage
from fsdp2.errors import CorruptError
from fsdp2.placement.box import Box, whole

BLOCK = 64
NUM_ROWS = 250  # bytes: three blocks and a part of one


@pytest.fixture(params=[16, 64, 128, 1024], ids=lambda chunk: f"chunk{chunk}")
def requests(request, tmp_path, monkeypatch):
    """A tensor of bytes whose values are their places, and what makes a request for a range of it."""
    monkeypatch.setattr(reading, "BLOCK", BLOCK)
    monkeypatch.setattr(LocalReader, "chunk", request.param)
    content = bytes(range(NUM_ROWS))
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8 + content)
    sums = "".join(checksum(content[at : at + BLOCK]) for at in range(0, NUM_ROWS, BLOCK))
    piece = StoredPiece(str(path), 8, whole((NUM_ROWS,)), whole((NUM_ROWS,)), "U8", sums)

    def make(first, last):
        return Request("w", torch.zeros(last - first, dtype=torch.uint8), Box((first,), (last - first,)), piece)

    return make, path


@pytest.mark.parametrize(("first", "last"), [(0, 250), (0, 128), (64, 250), (3, 250), (3, 60), (70, 200), (192, 250)])
def test_every_range_comes_back(requests, first, last):
    make, _ = requests
    request = make(first, last)
    read_all(OpenFiles(LocalStorage()), [request])
    assert request.target.tolist() == list(range(first, last))


@pytest.mark.parametrize("at", [0, 63, 64, 130, 191, 192, 249])
def test_the_damaged_block_is_named(requests, at):
    make, path = requests
    content = bytearray(path.read_bytes())
    content[8 + at] ^= 1
    path.write_bytes(content)
    first = at // BLOCK * BLOCK
    with pytest.raises(CorruptError, match=rf"bytes {first}\.\.{min(first + BLOCK, NUM_ROWS)} of its part"):
        read_all(OpenFiles(LocalStorage()), [make(0, NUM_ROWS)])
    if first:
        read_all(OpenFiles(LocalStorage()), [make(0, first)])  # what is not asked for is not looked at


def test_a_lot_is_of_one_file(requests, tmp_path):
    make, path = requests
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[::-1] + b"x" * 8)
    reverse = make(0, 10)
    reverse.piece = replace(reverse.piece, path=str(other), offset=0, sums="")
    request = make(0, 10)
    read_all(OpenFiles(LocalStorage()), [request, reverse])
    assert request.target.tolist() == list(range(10))
    assert reverse.target.tolist() == list(range(249, 239, -1))
