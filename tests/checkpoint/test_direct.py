"""Writing past the page cache: the bytes of the file are the same, whatever the ranges and the file system."""

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.storage import local
from fsdp2.checkpoint.storage.local import LocalStorage, LocalWriter
from fsdp2.disk import direct
from fsdp2.disk.direct import PAGE, open_direct

PWriteV = Callable[[int, list[memoryview], int], int]


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a disk that takes direct writes; every whole page goes there, three at a time."""
    probe = tmp_path / "probe"
    probe.touch()
    with open(probe, "rb") as file:
        opened = open_direct(str(probe), file.fileno(), 0)
    if opened is None:
        pytest.skip("the temporary folder is on no disk, or on one without direct writes")
    opened.close()
    monkeypatch.setattr(local, "DIRECT_FROM", PAGE)
    monkeypatch.setattr(direct, "PIECE", 3 * PAGE)
    return tmp_path


class Writes:
    """What was asked of `os.pwritev`: (is it direct, bytes, offset). `answer` may do something else for direct ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[bool, int, int]] = []
        self.answer: PWriteV = os.pwritev
        pwritev = os.pwritev

        def write(fd: int, parts: list[memoryview], offset: int) -> int:
            nbytes = sum(part.nbytes for part in parts)
            self.seen.append((is_direct(fd), nbytes, offset))
            return (self.answer if is_direct(fd) else pwritev)(fd, parts, offset)

        monkeypatch.setattr(os, "pwritev", write)

    def direct_bytes(self) -> int:
        return sum(nbytes for was_direct, nbytes, _ in self.seen if was_direct)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def ranges(size: int, most: int, seed: int) -> Iterator[tuple[int, int]]:
    """All of a file in pieces of any size; some of them begin or end at a page."""
    generator = random.Random(seed)
    begin = 0
    while begin < size:
        end = begin + generator.randint(1, most)
        if generator.random() < 0.3:
            end = max(begin + 1, end // PAGE * PAGE)
        yield begin, min(end, size)
        begin = end


def in_parts(content: bytes, seed: int) -> list[memoryview]:
    """The same bytes, out of several places."""
    cuts = sorted(random.Random(seed).choices(range(len(content) + 1), k=5))
    return [memoryview(content)[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def write_in_ranges(writer: LocalWriter, content: bytes, most: int, seed: int) -> None:
    def write(of: tuple[int, int]) -> None:
        writer.write(of[0], in_parts(content[slice(*of)], of[0]))

    pieces = list(ranges(len(content), most, seed))
    random.Random(seed).shuffle(pieces)
    run_all(write, pieces, 4, "test-direct")


@pytest.mark.parametrize("seed", range(6))
def test_any_ranges_from_any_thread(disk: Path, writes: Writes, seed: int) -> None:
    """Also of a file that has been there, and was longer; and where a disk writes less than it is given."""
    path, pwritev = disk / "file", writes.answer
    if seed % 3 == 2:
        writes.answer = lambda fd, parts, offset: pwritev(fd, [parts[0][:PAGE]], offset)
    path.write_bytes(b"old" * 100_000)
    content = random.Random(seed).randbytes(40 * PAGE + seed * 531)
    writer = LocalStorage().write_file(str(path), len(content))
    write_in_ranges(writer, content, 10 * PAGE, seed)
    writer.finish()
    assert path.read_bytes() == content
    assert writes.direct_bytes() > 10 * PAGE
    for was_direct, nbytes, offset in writes.seen:
        if was_direct:
            assert offset % PAGE == 0 and nbytes % PAGE == 0 and nbytes <= 3 * PAGE


@pytest.mark.parametrize("seed", range(3))
def test_several_write_to_one_file(disk: Path, writes: Writes, seed: int) -> None:
    """As ranks do to a consolidated one: they share the page at which one's part ends and another's begins."""
    path, content = disk / "file", random.Random(seed).randbytes(60 * PAGE + 77)
    cuts = [0, 20 * PAGE + 1 + seed, 41 * PAGE - 1 - seed, len(content)]
    writers = [LocalStorage().write_file(str(path), len(content), True) for _ in range(3)]

    def write(rank: int) -> None:
        for begin, end in ranges(cuts[rank + 1] - cuts[rank], 9 * PAGE, seed):
            writers[rank].write(cuts[rank] + begin, [memoryview(content)[cuts[rank] + begin : cuts[rank] + end]])
        writers[rank].finish()

    run_all(write, range(3), 3, "test-direct")
    assert path.read_bytes() == content
    assert writes.direct_bytes() > 10 * PAGE


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_file_system_that_refuses_a_write(disk: Path, writes: Writes, after: int) -> None:
    """From the first on, or only later, in the middle of a range; then all goes through the cache."""
    pwritev, refused = writes.answer, []

    def answer(fd: int, parts: list[memoryview], offset: int) -> int:
        if len([None for was_direct, *_ in writes.seen if was_direct]) > after:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(fd, parts, offset)

    writes.answer = answer
    content = random.Random(after).randbytes(40 * PAGE)
    writer = LocalStorage().write_file(str(disk / "file"), len(content))
    for begin in range(0, len(content), 10 * PAGE):
        writer.write(begin, [memoryview(content)[begin : begin + 10 * PAGE]])
    writer.finish()
    assert (disk / "file").read_bytes() == content
    assert len(refused) == 1
