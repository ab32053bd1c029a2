"""Folders of other libraries, damaged or made to harm: an error, or the right values; and nothing is executed."""

import io
import os
import pickle
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint.formats.unpickling import Note, unpickle
from fsdp2.errors import CorruptError, FSDPError
from tests.helpers.dcp_saves import change_metadata, save_dcp


class Evil:
    """Its pickle makes a file when it is executed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.file),))


STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "step": torch.tensor(3.0)}


def saved(folder: Path, **others: Any) -> Path:
    return save_dcp(folder / "dcp", {"model": STATE, **others})


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(value) for name, value in STATE.items()}
    checkpoint.load(folder, model=found)
    return found


def is_right(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in STATE.items())


@pytest.mark.parametrize("place", ["planner_data", "state_dict_metadata"])
def test_code_in_the_metadata_is_refused(tmp_path: Path, place: str) -> None:
    folder, mark = saved(tmp_path), tmp_path / "executed"

    def plant(metadata: Any) -> None:
        if place == "planner_data":
            metadata.planner_data = Evil(mark)
        else:
            metadata.state_dict_metadata["evil"] = Evil(mark)

    change_metadata(folder, plant)
    with pytest.raises(CorruptError, match=r"posix\.mkdir.*Nothing was executed"):
        loaded(folder)
    assert not mark.exists()


def test_code_in_a_value_is_not_read(tmp_path: Path) -> None:
    """A data loader that was pickled whole: the model loads, the rest is named."""
    folder = saved(tmp_path, dataloader={"state": Evil(tmp_path / "executed")})
    assert is_right(loaded(folder))
    assert checkpoint.describe(folder).left_out.keys() == {"'dataloader'"}
    assert not (tmp_path / "executed").exists()


def test_code_in_place_of_a_tensor(tmp_path: Path) -> None:
    folder, mark = saved(tmp_path), tmp_path / "executed"
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)

    def point(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.a":
                info.relative_path, info.offset, info.length = "evil", 0, len(buffer.getvalue())

    (folder / "evil").write_bytes(buffer.getvalue())
    change_metadata(folder, point)
    with pytest.raises(CorruptError, match=r"refers to posix\.mkdir, .*Nothing was executed"):
        loaded(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", ".metadata", "", "a\0b", 3])
def test_files_outside_of_the_folder(tmp_path: Path, name: Any) -> None:
    folder = saved(tmp_path)
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    change_metadata(
        folder, lambda metadata: [setattr(info, "relative_path", name) for info in metadata.storage_data.values()]
    )
    with pytest.raises(CorruptError, match="cannot be a file of a checkpoint"):
        loaded(folder)


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(FSDPError, match=r"__0_0\.distcp: cannot be opened"):
        loaded(folder)


def chunks(metadata: Any) -> list[Any]:
    return metadata.state_dict_metadata["model.a"].chunks


def place(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: setattr(chunks(metadata)[0], "sizes", torch.Size((4, 4))), "has a part"),
        (lambda metadata: setattr(place(metadata), "offset", place(metadata).offset + 64), "torch.save"),
        (lambda metadata: setattr(place(metadata), "length", 1 << 62), "should be a file of torch.save"),
        (lambda metadata: metadata.storage_data.clear(), "does not say where 'model.a'"),
        (lambda metadata: chunks(metadata).clear(), "hold 0 of 12 elements"),
        (lambda metadata: metadata.state_dict_metadata.update({"model.a": "x"}), "is malformed"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    folder = saved(tmp_path)
    change_metadata(folder, change)
    with pytest.raises(CorruptError, match=message):
        loaded(folder)


def test_every_byte_of_metadata_and_headers(tmp_path: Path) -> None:
    """Flipped bits and cuts: an error of ours or the right values; never anything else, and never for long."""
    folder = saved(tmp_path)
    generator = random.Random(0)
    for name, places in ((".metadata", None), ("__0_0.distcp", (b"PK", b"\x80\x02"))):
        good = (folder / name).read_bytes()
        data = [
            index for index in range(len(good)) if not any(tensor in good[index - 96 : index + 96] for tensor in raw())
        ]
        spots = range(len(good)) if places is None else data
        for index in generator.sample(spots, 250):
            bad = bytearray(good)
            bad[index] ^= 1 << generator.randrange(8)
            (folder / name).write_bytes(bad)
            start = time.monotonic()
            with suppress(FSDPError):
                assert is_right(loaded(folder)), (name, index)
            assert time.monotonic() - start < 5
        for length in generator.sample(range(len(good)), 30):
            (folder / name).write_bytes(good[:length])
            with pytest.raises(FSDPError):
                loaded(folder)
        (folder / name).write_bytes(good)
    assert is_right(loaded(folder))


def raw() -> list[bytes]:
    return [bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) for value in STATE.values()]


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02Nr\xff\xff\xff\xff",  # an entry far up in the memo
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a text of 2^63 bytes
        b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00Ns.",  # a key whose hash takes 2^60 steps
        b"\x80\x02\x8a\xff.",
        b"not a pickle",
    ],
)
def test_hostile_pickles(program: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(CorruptError):
        unpickle(io.BytesIO(program), "x", frozenset())
    assert time.monotonic() - start < 20


def test_pickles_of_all_versions() -> None:
    """What Python writes comes back as it was; classes are notes."""
    value = {"a": [1, -5, 1 << 70, 2.5, None, True], 3: ("x", "ä\ud800"), "long": "y" * 300}
    for version in (2, 3, 4, 5):
        value |= {"b": b"\x00\xff"} if version > 2 else {}
        assert unpickle(io.BytesIO(pickle.dumps(value, version)), "x", ()) == value
        made = unpickle(io.BytesIO(pickle.dumps(Evil(Path("z")), version)), "x", ("posix.mkdir",))
        assert isinstance(made, Note) and (made.kind, made.args) == ("posix.mkdir", ("z",))
