"""Files made to do harm: refused with an error that names the file; nothing outside of the folder is opened.

What is written here are the tricks that have a name; `fuzz.py` tries the others.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp2 import checkpoint
from fsdp2.checkpoint.schema.header import parse_header
from fsdp2.checkpoint.schema.manifest import Manifest
from fsdp2.errors import CorruptError, FSDPError
from tests.checkpoint.fuzz import Corpus, Everything, deep, guarded, run_case
from tests.helpers.hostile_checkpoints import (
    MANIFEST,
    adam,
    edit_body,
    edit_header,
    edit_own,
    empty,
    is_sound,
    load,
    put_header,
    whole,
)

CASES = int(os.environ.get("FUZZ_CASES", "300"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return whole(tmp_path / "run" / "step-00000001")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder of Hugging Face, in two files."""
    folder = whole(tmp_path / "plain", consolidated=True)
    for path in folder.iterdir():
        if not path.name.startswith("model"):
            path.unlink()
    return folder


def load_plain(folder: Path) -> dict[str, Any]:
    into = empty()
    del into["note"]
    checkpoint.load(folder, model=into)
    return into


# --- headers ----------------------------------------------------------------------------------------------------------


def row(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS: dict[str, Any] = {
    "offsets past the end": {"a": row(0, 16), "b": row(16, 1 << 40)},
    "2^64 + what would be right": {"a": row(0, (1 << 64) + 16, [4])},
    "overlap": {"a": row(0, 16), "b": row(8, 16)},
    "a hole": {"a": row(0, 4), "b": row(8, 16)},
    "end before begin": {"a": row(16, 0, [4])},
    "shape of another size": {"a": row(0, 16, [5])},
    "shape that overflows to the right size": {"a": row(0, 16, [1 << 62, 1 << 62, 4])},
    "huge and empty": {"a": row(0, 16), "b": row(16, 16, [1 << 63, 0])},
    "negative sizes": {"a": row(0, 16, [-2, -2])},
    "sizes that are booleans": {"a": row(0, 4, [True])},
    "dtype that is a list": {"a": row(0, 16, dtype=["F32"])},
    "more than it should have": {"a": {**row(0, 16), "code": "import os"}},
    "no object": [1, 2],
    "metadata that are no strings": {"__metadata__": {"format": 7}, "a": row(0, 16)},
    "a key twice": b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {}}',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "not UTF-8": b'{"\xff": 1}',
    "nothing": b"",
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies(plain: Path, what: str) -> None:
    header = HEADERS[what]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CorruptError, match="file"):
        parse_header(text, "file", 8 + len(text) + 16)
    victim = next(plain.glob("model-00001*"))
    put_header(victim, text, bytes(16))
    with pytest.raises(CorruptError, match=victim.name):
        load_plain(plain)


def test_the_header_that_they_vary_is_sound() -> None:
    """The headers of the other tests are changes of this one."""
    text = json.dumps({"a": row(0, 16), "b": row(16, 16, [0, 7])}).encode()
    assert parse_header(text, "file", 8 + len(text) + 16).tensors["a"].nbytes == 16


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 1 << 62, (1 << 64) - 1])
def test_lengths_of_headers(plain: Path, folder: Path, length: int) -> None:
    """None makes the reader allocate what the file does not have."""
    for where, loading in ((plain, load_plain), (folder, load)):
        victim = next(where.glob("model-*.safetensors"))
        raw = victim.read_bytes()
        victim.write_bytes(length.to_bytes(8, "little") + raw[8:])
        with guarded(where.resolve()), pytest.raises(CorruptError, match=victim.name):
            loading(where)


# --- paths ------------------------------------------------------------------------------------------------------------

NAMES = ["../secret.safetensors", "/etc/passwd", "..\\secret.safetensors", "C:secret", "..", "", ".hidden", "a\0b", 7]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_paths(folder: Path, plain: Path, name: Any) -> None:
    """Wherever a file is named, a path that leads elsewhere is refused before anything is opened."""
    secret = folder.parent / "secret.safetensors"
    shutil.copy(next(folder.glob("model-*")), secret)
    shutil.copy(secret, plain.parent / secret.name)
    index = plain / "model.safetensors.index.json"
    listed = json.loads(index.read_bytes())
    listed["weight_map"]["embed"] = name
    index.write_text(json.dumps(listed))
    with guarded(plain.resolve()), pytest.raises(CorruptError, match="index"):
        load_plain(plain)
    if isinstance(name, str):

        def change(body: dict[str, Any]) -> None:
            body["files"][name] = [secret.stat().st_size, "00000000"]

        edit_body(folder, change)
        with guarded(folder.resolve()), pytest.raises(CorruptError, match=MANIFEST):
            load(folder)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    """What lies in the way of a save, in a folder that others may write to, is not followed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("precious")
    root = tmp_path / "run"
    root.mkdir()
    (root / ".tmp-step-00000001-0123456789ab").symlink_to(precious)
    (root / ".old-step-00000001-0123456789ab").symlink_to(precious)
    whole(root, step=1)
    assert (precious / "thesis.txt").read_text() == "precious"
    assert is_sound(load(root / "step-00000001"))


# --- manifests --------------------------------------------------------------------------------------------------------


BODIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown format": lambda body: body.update(format="fsdp2/99"),
    "unknown layout": lambda body: body.update(layout="../x"),
    "a world without end": lambda body: body.update(world=1 << 62),
    "a mesh of other ranks": lambda body: body["tables"][0]["meshes"][0].update(shape=[1 << 31, 1 << 31]),
    "a cut of a dim that is not there": lambda body: body["tables"][0]["tensors"]["model"]["embed"].__setitem__(
        3, [[0, 9]]
    ),
    "a cut twice": lambda body: body["tables"][0]["tensors"]["model"]["embed"].__setitem__(3, [[0, 0], [0, 0]]),
    "an alias of itself": lambda body: body["tables"][0]["aliases"]["model"].update(embed="embed2", head="head"),
    "extra elsewhere": lambda body: body["extra"]["loader"][0].update(file="../secret.safetensors"),
    "extra of no kind": lambda body: body["extra"]["loader"][0].update(json={"$import": "os"}),
    "extra with a tensor that is not there": lambda body: body["extra"]["loader"][0].update(json={"$tensor": "zzz"}),
    "deep extra": lambda body: body["extra"]["loader"][0].update(json=deep(900, "list")),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_forged_manifest(folder: Path, what: str) -> None:
    """Its checksum is right, and yet a load refuses it."""
    edit_body(folder, lambda body: BODIES[what](body) and None)
    into, everything = empty(), {"loader": Everything(), "words": Everything()}
    moments = {"moment.embed": torch.zeros(40, 3)}
    with guarded(folder.resolve()), pytest.raises(FSDPError):
        checkpoint.load(folder, model=into, optimizer=moments, extra=everything)


NONE = [b"", b"{}", b"null", b'{"crc32": "0", "body": {}}', b"[" * 10**5]


@pytest.mark.parametrize("text", NONE, ids=lambda text: repr(text)[:40])
def test_a_manifest_that_is_empty_or_no_json_object(text: bytes) -> None:
    with pytest.raises(CorruptError, match=MANIFEST):
        Manifest.parse(text, MANIFEST)


@pytest.mark.parametrize("what", ["other parameters", "state of a size that no file holds"])
def test_a_forged_manifest_of_adam(what: str, tmp_path: Path) -> None:
    model, optimizer = adam()
    folder = tmp_path / "a"
    checkpoint.save(folder, model=model, optimizer=optimizer)

    def change(body: dict[str, Any]) -> None:
        table = body["tables"][0]
        if what == "other parameters":
            table["values"]["optimizer"]["groups"][0]["options"].update(params=[])
        else:
            table["tensors"]["optimizer"]["exp_avg.weight"][1] = [1 << 40]
            table["values"]["optimizer"]["states"]["weight"]["exp_avg"]["as"] = "plain"

    edit_body(folder, change)
    other, fresh = adam(seed=2, steps=0)
    with guarded(folder.resolve()), pytest.raises(FSDPError):
        checkpoint.load(folder, model=other, optimizer=fresh)


def test_a_forged_file_of_a_rank(folder: Path) -> None:
    """With all checksums right."""
    victim = next(folder.glob("model-*"))
    raw, manifest = victim.read_bytes(), (folder / MANIFEST).read_bytes()
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda own: own.update(id="another"),
        lambda own: own.update(rank=1),
        lambda own: own["sums"].update(embed=""),
        lambda own: own["sums"].update(embed=own["sums"]["embed"] * 2),
        lambda own: own["shards"].update(embed=[[40, 3], [1, 0]]),
        lambda own: own["shards"].pop("embed"),
    ]
    for change in changes:
        edit_header(victim, lambda header, change=change: edit_own(header, change))
        with pytest.raises(CorruptError, match=victim.name):
            load(folder)
        victim.write_bytes(raw)
        (folder / MANIFEST).write_bytes(manifest)
    edit_header(victim, lambda header: header["bias"].update(dtype="F16"))  # it is BF16
    with pytest.raises(CorruptError, match="bias"):
        load(folder)


# --- everything else --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [CASES, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_fuzz(tmp_path: Path, cases: int) -> None:
    """A folder with random damage, or forged, is read or raises one of our errors: no hang, no other file is opened.
    Accidents never load other values where there are checksums."""
    corpus = Corpus(tmp_path.resolve())

    @settings(
        max_examples=cases,
        derandomize="FUZZ_CASES" not in os.environ,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def check(chance: random.Random) -> None:
        run_case(corpus, chance)

    check()
