"""Past the page cache: which memory the disk reads and writes as it is, and which is copied through a buffer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.direct import PAGE, PIECE, DirectFile, memory_at, open_direct

SIZES = [PAGE, 3 * PAGE, PIECE + PAGE, PAGE + 17, 100]


def memory(nbytes: int, shift: int) -> tuple[torch.Tensor, memoryview]:
    """Memory that begins `shift` bytes after a page does, and its owner."""
    owner = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    first = -owner.data_ptr() % PAGE + shift
    return owner, memory_at(owner.data_ptr() + first, nbytes)


def opened(folder: Path) -> DirectFile:
    path = folder / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        file = open_direct(str(path), fd, os.O_RDWR)
    finally:
        os.close(fd)
    if file is None:
        pytest.skip("this file system has no direct reads and writes")
    return file


def spied(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How many bytes each call of a function of `os` is about."""
    sizes: list[int] = []
    real: Callable[..., Any] = getattr(os, name)

    def spy(fd: int, views: list[memoryview], offset: int) -> Any:
        sizes.append(views[0].nbytes)
        return real(fd, views, offset)

    monkeypatch.setattr(os, name, spy)
    return sizes


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_written_is_read(tmp_path: Path, nbytes: int, shift: int) -> None:
    file = opened(tmp_path)
    values = os.urandom(nbytes)
    _owner, source = memory(nbytes, shift)
    source[:] = values
    rest = memoryview(bytes(-nbytes % PAGE))
    before = memoryview(bytes(PAGE))  # another tensor, which cannot be written as it is: it is read-only
    assert file.write(0, [before, source, rest])
    _other, target = memory(nbytes, shift)
    assert file.read(PAGE, target)
    assert target == values
    assert (tmp_path / "file").read_bytes() == bytes(PAGE) + values + bytes(rest)
    file.close()


def test_pages_of_memory_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an optimizer in files was copied twice in each step."""
    file = opened(tmp_path)
    nbytes = 2 * PIECE + PAGE
    for shift, expected in ((0, [nbytes]), (64, [PIECE, PIECE, PAGE])):
        _owner, view = memory(nbytes, shift)
        view[:] = bytes(nbytes)
        for name in ("pwritev", "preadv"):
            with monkeypatch.context() as patched:
                sizes = spied(patched, name)
                assert file.write(0, [view]) if name == "pwritev" else file.read(0, view)
            assert sizes == expected, name
    file.close()
