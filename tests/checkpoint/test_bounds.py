"""Hostile files cost memory and time in proportion to what they hold: each is read in a process that is measured."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp2 import checkpoint
from fsdp2.errors import CorruptError
from tests.helpers.dcp_saves import change_metadata, save_dcp
from tests.helpers.hostile_checkpoints import MANIFEST, adam, edit_body

# Whatever a file claims, and for each byte that it has on the disk; see SECURITY.md.
FIXED = 640 << 20
A_BYTE = 128
SECONDS = 60

# Reads all of a folder, and tells how much memory and time that took and what came of it.
READER = """
import json, resource, sys, warnings
import torch
from fsdp2 import checkpoint, errors
warnings.simplefilter("ignore")
model = torch.nn.Linear(4, 3)
before, ends = resource.getrusage(resource.RUSAGE_SELF), []
for read in (lambda: checkpoint.load(sys.argv[1], model=model, strict=False),
             lambda: checkpoint.verify(sys.argv[1])):
    try:
        read()
        ends.append("read")
    except Exception as error:
        ends.append(f"{type(error).__name__} {str(error)[:300]}")
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([(after.ru_maxrss - before.ru_maxrss) * 1024, after.ru_utime - before.ru_utime, ends]))
"""


def ours(folder: Path, **options: Any) -> Path:
    model, optimizer = adam()
    checkpoint.save(folder, model=model, optimizer=optimizer, **options)
    return folder


def by_torch(folder: Path) -> Path:
    states = dict(zip(("model", "optimizer"), get_state_dict(*adam()), strict=True))
    return save_dcp(folder, {**states, "note": {"a": 1}})


def grow(path: Path, size: int) -> None:
    """To that size, without memory on the disk."""
    with path.open("ab") as file:
        file.truncate(size)


def compressed_byteorder(folder: Path) -> None:
    """A tensor in an archive whose byte order is 2 GB, which 2 MB hold."""
    path = folder / "bomb"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("archive/byteorder")
        info.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(info, "w", force_zip64=True) as file:
            for _ in range(128):
                file.write(bytes(1 << 24))

    def point(metadata: Any) -> None:
        for where in metadata.storage_data.values():
            where.relative_path, where.offset, where.length = "bomb", 0, path.stat().st_size

    change_metadata(folder, point)


def absurd_shapes(folder: Path) -> None:
    """Of all tensors."""

    def change(metadata: Any) -> None:
        for about in metadata.state_dict_metadata.values():
            if hasattr(about, "size"):
                about.size = torch.Size((1 << 19, 1 << 19)[: len(about.size)])

    change_metadata(folder, change)


def hollow(folder: Path, name: str, size: int, start: bytes = b"") -> None:
    """A file of that size, with nothing but its beginning on the disk."""
    (folder / name).write_bytes(start)
    grow(folder / name, size)


def sparse_index(folder: Path) -> None:
    """The manifest confirms that the index has 3 GB."""
    name = "model.safetensors.index.json"
    grow(folder / name, 3 << 30)
    edit_body(folder, lambda body: {**body, "files": {**body["files"], name: [3 << 30, "00000000"]}})


def large_header(folder: Path) -> None:
    path = next(folder.glob("model-*.safetensors"))
    hollow(folder, path.name, 100_000_000, (99_000_000).to_bytes(8, "little") + b'{"a":')
    edit_body(folder, lambda body: {**body, "files": {**body["files"], path.name: [100_000_000, "00000000"]}})


def long_text(folder: Path) -> None:
    hollow(folder, ".metadata", 4 * GB, b"\x80\x04\x8d" + (3 * GB).to_bytes(8, "little"))


GB = 1 << 30
CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "a compressed byteorder": (by_torch, compressed_byteorder),
    "absurd shapes": (by_torch, absurd_shapes),
    "metadata with a hollow end": (by_torch, lambda folder: grow(folder / ".metadata", 3 * GB)),
    "a text of 3 GB": (by_torch, long_text),
    "a hollow index": (lambda folder: ours(folder, consolidated=True, max_file_bytes=20), sparse_index),
    "a hollow manifest": (ours, lambda folder: hollow(folder, MANIFEST, 250 << 20, b'{"crc32": ')),
    "a hollow header": (ours, large_header),
}  # fmt: skip
SOUND = {"metadata with a hollow end", "a hollow index"}  # what is harmful is not read, and the rest is


@pytest.mark.parametrize("name", CASES)
@pytest.mark.exhaustive
def test_what_a_hostile_file_costs(name: str, tmp_path: Path) -> None:
    """Each took gigabytes, or all that there was, before it was refused."""
    make, spoil = CASES[name]
    folder = make(tmp_path / "a")
    spoil(folder)
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    command = [sys.executable, "-c", READER, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    memory, seconds, ends = json.loads(result.stdout)
    told = f"{memory >> 20} MB and {seconds:.1f} s for {held >> 20} MB: {ends}"
    assert all(end.startswith("CorruptError") or (end == "read" and name in SOUND) for end in ends), told
    assert memory < FIXED + A_BYTE * held and seconds < SECONDS, told


def test_claims_that_the_folder_cannot_hold(tmp_path: Path) -> None:
    """It ended in ``RuntimeError: you tried to allocate 962 GB``."""
    folder = by_torch(tmp_path / "a")
    absurd_shapes(folder)
    with pytest.raises(CorruptError, match=r"weight.* is F32 \[524288, 524288\], and all files have"):
        checkpoint.load(folder, model=adam()[0])
