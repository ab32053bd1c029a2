"""Foreign and hostile files that were once read wrongly, or for minutes, or into all of the memory."""

import io
import json
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp2.checkpoint.formats.unpickling import unpickle
from fsdp2.checkpoint.schema.header import parse_header, parse_json
from fsdp2.checkpoint.schema.manifest import Manifest
from fsdp2.errors import CorruptError
from fsdp2.placement.box import Box, Cover
from tests.helpers.hostile_checkpoints import edit_body, whole

# --- small files that cost much ---------------------------------------------------------------------------------------


def test_many_keys_with_one_twice() -> None:
    keys = [f'"{number}":0' for number in range(30_000)]
    start = time.monotonic()
    with pytest.raises(CorruptError, match="the key '29999' appears twice"):
        parse_json(("{" + ",".join([*keys, '"29999":1']) + "}").encode(), "x")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("dims", [65, 80_000])
def test_a_header_with_many_dims(dims: int) -> None:
    entry = {"dtype": "U8", "shape": [(1 << 62) - 1] * dims, "data_offsets": [0, 1]}
    text = json.dumps({"a": entry}).encode()
    start = time.monotonic()
    with pytest.raises(CorruptError, match=f"'a' has {dims} dims; expected at most 64"):
        parse_header(text, "x", 8 + len(text) + 1)
    assert time.monotonic() - start < 2


def test_a_manifest_with_many_dims(tmp_path: Path) -> None:
    folder = whole(tmp_path / "saved")
    shape = [(1 << 62) - 1] * 80_000
    edit_body(folder, lambda body: body["tables"][0]["meshes"][0].update(shape=shape))
    start = time.monotonic()
    with pytest.raises(CorruptError, match="80000 dims; expected at most 64"):
        Manifest.parse((folder / "checkpoint.json").read_bytes(), "checkpoint.json")
    assert time.monotonic() - start < 5


def text(content: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content


# A large object in the memo, and then again and again what makes another object of it. Lists keep them all.
AMPLIFIED = {
    "sizes": b"ctorch\nSize\nq\x00(" + b"K\x01" * 50_000 + b"t\x85q\x01]" + b"h\x00h\x01Ra" * 1000 + b".",
    "set": b"cbuiltins\nset\nq\x00](" + b"K\x01" * 50_000 + b"e\x85q\x01]" + b"h\x00h\x01Ra" * 1000 + b".",
    "names": text(b"x" * 500_000) + b"q\x00]" + b"h\x00h\x00\x93a" * 1000 + b".",
}


@pytest.mark.parametrize("kind", AMPLIFIED)
def test_pickles_that_make_much_of_little(kind: str) -> None:
    """A small pickle must not fill the memory."""
    program = b"\x80\x02" + AMPLIFIED[kind]
    tracemalloc.start()
    with suppress(CorruptError):
        unpickle(io.BytesIO(program), "x", ("torch.Size", "builtins.set"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


# --- parts that overlap -----------------------------------------------------------------------------------------------


def cover_of(shape: tuple[int, ...], parts: list[Box]) -> Cover:
    cover = Cover(Box((0,) * len(shape), shape))
    for part in parts:
        cover.add(part)
    return cover


def problem_of(cover: Cover) -> str:
    try:
        cover.check("x")
    except CorruptError as error:
        return "overlap" if "overlap" in str(error) else "missing"
    return ""


@st.composite
def parts_of_a_cube(draw: Any) -> tuple[int, list[Box]]:
    """Up to six boxes within a cube of three elements a side, in as many dims as the first of both says."""
    ndim, parts = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.tuples(*[st.integers(0, 2)] * ndim))
        parts.append(Box(start, tuple(draw(st.integers(0, 3 - at)) for at in start)))
    return ndim, parts


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(parts_of_a_cube())
@example((0, [Box((), ())]))
@example((2, [Box((0, 0), (2, 3)), Box((1, 0), (1, 3))]))  # as many elements overlap as are missing
def test_overlaps_are_found(drawn: tuple[int, list[Box]]) -> None:
    """As by counting how often each element is there."""
    ndim, parts = drawn
    counts = torch.zeros((3,) * ndim)
    for part in parts:
        counts[part.slices()] += 1
    expected = "overlap" if (counts > 1).any() else "missing" if (counts == 0).any() else ""
    problem = problem_of(cover_of((3,) * ndim, parts))
    assert problem == expected or ({problem, expected} == {"overlap", "missing"} and counts.sum() <= counts.numel())
