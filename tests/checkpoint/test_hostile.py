"""Files made to do harm: refused with an error that names the file; nothing outside of the folder is opened.

What is written here are the tricks that have a name; `fuzz.py` tries the others.
"""

import contextlib
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
from tests.checkpoint.fuzz import Corpus, Everything, guarded, run_case
from tests.helpers.hostile_checkpoints import (
    MANIFEST,
    adam,
    edit_body,
    edit_header,
    edit_own,
    empty,
    header_of,
    is_sound,
    load,
    put_header,
    sign,
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
    "negative offsets": {"a": row(-16, 0), "b": row(0, 16)},
    "2^63": {"a": row(0, 16), "b": row(16, 1 << 63)},
    "2^64 + what would be right": {"a": row(0, (1 << 64) + 16, [4])},
    "overlap": {"a": row(0, 16), "b": row(8, 16)},
    "the same bytes twice": {"a": row(0, 16), "b": row(0, 16)},
    "a hole": {"a": row(0, 4), "b": row(8, 16)},
    "end before begin": {"a": row(16, 0, [4])},
    "shape of another size": {"a": row(0, 16, [5])},
    "shape that overflows to the right size": {"a": row(0, 16, [1 << 62, 1 << 62, 4])},
    "huge and empty": {"a": row(0, 16), "b": row(16, 16, [1 << 63, 0])},
    "negative sizes": {"a": row(0, 16, [-2, -2])},
    "sizes that are no numbers": {"a": row(0, 16, ["4"])},
    "sizes that are booleans": {"a": row(0, 4, [True])},
    "sizes with a point": {"a": row(0, 16, [4.0])},
    "dtype that is a list": {"a": row(0, 16, dtype=["F32"])},
    "no dtype": {"a": {"shape": [4], "data_offsets": [0, 16]}},
    "more than it should have": {"a": {**row(0, 16), "code": "import os"}},
    "no object": [1, 2],
    "a number": 7,
    "metadata that are no strings": {"__metadata__": {"format": 7}, "a": row(0, 16)},
    "a key twice": b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {}}',
    "a key twice within": b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "not UTF-8": b'{"\xff": 1}',
    "not JSON": b"\x80\x04\x95.",
    "NaN": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}',
    "nothing": b"",
}


@pytest.mark.parametrize("what", HEADERS)
def test_hostile_headers(plain: Path, what: str) -> None:
    header = HEADERS[what]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CorruptError, match="file"):
        parse_header(text, "file", 8 + len(text) + 16)
    victim = next(plain.glob("model-00001*"))
    put_header(victim, text, bytes(16))
    with pytest.raises(CorruptError, match=victim.name):
        load_plain(plain)


def test_the_header_that_they_vary_is_sound() -> None:
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


def test_a_sparse_header(plain: Path) -> None:
    """A file of 1 TiB that claims a header as large."""
    victim = next(plain.glob("model-00001*"))
    with open(victim, "r+b") as file:
        file.write(((1 << 40) - 8).to_bytes(8, "little"))
        file.truncate(1 << 40)
    with guarded(plain.resolve()), pytest.raises(CorruptError, match=victim.name):
        load_plain(plain)


# --- paths ------------------------------------------------------------------------------------------------------------

NAMES = [
    "../secret.safetensors",
    "/etc/passwd",
    "sub/model.safetensors",
    "..\\secret.safetensors",
    "C:secret",
    "..",
    ".",
    "",
    ".hidden",
    "a\0b",
    "a\nb",
    "x" * 256,
    7,
    None,
    ["model.safetensors"],
]


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


def test_extra_state_in_a_file_elsewhere(folder: Path) -> None:
    for file in ("../secret.safetensors", "/etc/passwd", "not listed", 5):
        manifest = (folder / MANIFEST).read_bytes()
        edit_body(folder, lambda body, file=file: body["extra"]["loader"][0].update(file=file))
        with guarded(folder.resolve()), pytest.raises(CorruptError, match=MANIFEST):
            load(folder)
        (folder / MANIFEST).write_bytes(manifest)


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


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


BODIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown format": lambda body: body.update(format="fsdp2/99"),
    "unknown layout": lambda body: body.update(layout="../x"),
    "negative size": lambda body: body["files"].update({next(iter(body["files"])): [-1, "0"]}),
    "2^63 ranks": lambda body: body.update(world=1 << 63),
    "a world without end": lambda body: body.update(world=1 << 62),
    "no tables": lambda body: body.pop("tables"),
    "tables that are a number": lambda body: body.update(tables=5),
    "a mesh of other ranks": lambda body: body["tables"][0]["meshes"][0].update(shape=[1 << 31, 1 << 31]),
    "a cut of a dim that is not there": lambda body: body["tables"][0]["tensors"]["model"]["embed"].__setitem__(
        3, [[0, 9]]
    ),
    "a cut twice": lambda body: body["tables"][0]["tensors"]["model"]["embed"].__setitem__(3, [[0, 0], [0, 0]]),
    "an alias of itself": lambda body: body["tables"][0]["aliases"]["model"].update(embed="embed2", head="head"),
    "an alias that is no name": lambda body: body["tables"][0]["aliases"]["model"].update(head=["embed"]),
    "values that are none": lambda body: body["tables"][0]["values"].update(model=7),
    "extra of no rank": lambda body: body["extra"]["loader"][0].update(ranks=0),
    "extra of no kind": lambda body: body["extra"]["loader"][0].update(json={"$import": "os"}),
    "extra with a tensor that is not there": lambda body: body["extra"]["loader"][0].update(json={"$tensor": "zzz"}),
    "extra with a tensor without name": lambda body: body["extra"]["loader"][0].update(json={"$tensor": ["x"]}),
    "deep extra": lambda body: body["extra"]["loader"][0].update(json=deep(900)),
    "deep values": lambda body: body["tables"][0]["values"]["model"].update(note=deep(900)),
    "sums of no file": lambda body: body.update(sums=[{"model.safetensors": 5}]),
    "a step that is none": lambda body: body.update(step="1"),
    "half a code point": lambda body: body["tables"][0]["tensors"]["model"].update({"\ud800": ["F32", [1], 0, []]}),
}


@pytest.mark.parametrize("what", BODIES)
def test_hostile_manifests(folder: Path, what: str) -> None:
    """With the right checksum."""
    edit_body(folder, lambda body: BODIES[what](body) and None)
    into, everything = empty(), {"loader": Everything(), "words": Everything()}
    moments = {"moment.embed": torch.zeros(40, 3)}
    with guarded(folder.resolve()), pytest.raises(FSDPError):
        checkpoint.load(folder, model=into, optimizer=moments, extra=everything)


NONE = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"crc32": "0", "body": {}}',
    b'{"crc32": "0", "crc32": "0", "body": {}}',
    b"[" * 10**5,
]


@pytest.mark.parametrize("text", NONE, ids=lambda text: repr(text)[:40])
def test_manifests_that_are_none(text: bytes) -> None:
    with pytest.raises(CorruptError, match=MANIFEST):
        Manifest.parse(text, MANIFEST)


def test_a_manifest_cannot_change_an_optimizer_otherwise(tmp_path: Path) -> None:
    """Options are those that an optimizer has: not its parameters, nor state of any size."""
    model, optimizer = adam()
    attacks: list[Callable[[dict[str, Any]], Any]] = [
        lambda values: values["groups"][0]["options"].update(params=[]),
        lambda values: values["groups"][0]["options"].update(lr={"$tensor": "lr", "value": 1, "dtype": "save"}),
        lambda values: values["groups"][0].update(options=[1]),
        lambda values: values["groups"][0]["params"].extend(["a", 5]),
        lambda values: values["states"]["weight"].update(exp_avg={"$tensor": 5}),
        lambda values: values["states"]["weight"].update(exp_avg={"$tensor": "step", "as": ["S99999"]}),
        lambda values: values["states"].update(weight=-1),
    ]
    for number, attack in enumerate(attacks):
        folder = tmp_path / str(number)
        checkpoint.save(folder, model=model, optimizer=optimizer)
        edit_body(folder, lambda body, attack=attack: attack(body["tables"][0]["values"]["optimizer"]) and None)
        other, fresh = adam(seed=2, steps=0)
        params = list(fresh.param_groups[0]["params"])
        with contextlib.suppress(FSDPError):
            checkpoint.load(folder, model=other, optimizer=fresh)
        assert all(mine is theirs for mine, theirs in zip(fresh.param_groups[0]["params"], params, strict=True))
        assert all(isinstance(state, dict) for state in fresh.state.values())


def test_state_of_a_size_that_no_file_holds(tmp_path: Path) -> None:
    """It is not allocated."""
    model, optimizer = adam()
    folder = tmp_path / "a"
    checkpoint.save(folder, model=model, optimizer=optimizer)

    def change(body: dict[str, Any]) -> None:
        table = body["tables"][0]
        table["tensors"]["optimizer"]["exp_avg.weight"][1] = [1 << 40]
        table["values"]["optimizer"]["states"]["weight"]["exp_avg"]["as"] = "plain"

    edit_body(folder, change)
    other, fresh = adam(seed=2, steps=0)
    with guarded(folder.resolve()), pytest.raises(FSDPError):
        checkpoint.load(folder, model=other, optimizer=fresh)


def test_what_a_rank_file_says_of_itself(folder: Path) -> None:
    """With all checksums right."""
    victim = next(folder.glob("model-*"))
    raw, manifest = victim.read_bytes(), (folder / MANIFEST).read_bytes()
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda own: own.update(id="another"),
        lambda own: own.update(rank=1),
        lambda own: own.update(shards=[]),
        lambda own: own.update(sums=None),
        lambda own: own["sums"].update(embed=7),
        lambda own: own["sums"].update(embed=""),
        lambda own: own["sums"].update(embed=own["sums"]["embed"] * 2),
        lambda own: own["shards"].update(embed=[[40, 3], [1, 0]]),
        lambda own: own["shards"].pop("embed"),
        lambda own: [own],
    ]
    for change in changes:
        edit_header(victim, lambda header, change=change: edit_own(header, change))
        with pytest.raises(CorruptError, match=victim.name):
            load(folder)
        victim.write_bytes(raw)
        (folder / MANIFEST).write_bytes(manifest)
    for text in ("\ud800", "[" * 10**5, "7", ""):
        header, data = header_of(victim)
        header["__metadata__"]["fsdp2"] = text
        put_header(victim, header, data)
        sign(victim)
        with pytest.raises(CorruptError, match=victim.name):
            load(folder)
        victim.write_bytes(raw)
        (folder / MANIFEST).write_bytes(manifest)


def test_names_that_cannot_be_printed(plain: Path) -> None:
    """Half a code point in a tensor's name: the error is still the one that says so."""
    index, victim = plain / "model.safetensors.index.json", next(plain.glob("model-00001*"))
    index.unlink()
    header, data = header_of(victim)
    first = next(name for name in header if name != "__metadata__")
    header["\ud800"] = header.pop(first)
    put_header(plain / "model.safetensors", header, data)
    with pytest.raises(FSDPError, match=r"unexpected|missing"):
        load_plain(plain)


# --- everything else --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [CASES, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_fuzz(tmp_path: Path, cases: int) -> None:
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
