"""Conversion between layouts, worlds and formats: the same bits, in bounded memory, and nothing is half done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.tensor import Shard

import fsdp2.checkpoint as fc
from fsdp2 import CheckpointError
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.describing import describe
from fsdp2.checkpoint.tools.inspection import verify
from fsdp2.errors import CorruptError
from tests.helpers.checkpoint_cases import assert_bits, mesh_of, put, random_bits, value_of
from tests.helpers.hostile_checkpoints import flip
from tests.helpers.ranks import run_on_ranks
from tests.helpers.source_tree import ROOT

TARGETS: dict[str, dict[str, Any]] = {"one file": {}, "small files": {"max_file_bytes": 500}}


# --- values -----------------------------------------------------------------------------------------------------------


def assert_loads(folder: str | Path, expected: dict[str, Any]) -> None:
    found = {
        key: random_bits(f"{key} before", value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
        for key, value in expected.items()
    }
    fc.load(folder, model=found)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_bits(key, found[key], value)
        else:
            assert found[key] == value, key


def large() -> dict[str, torch.Tensor]:
    """Several chunks a tensor, which cut through its rows."""
    few = {"b": value_of("b", (1009,)), "one": torch.tensor(2.5), "none": torch.empty(0, 4)}
    return {"w": value_of("w", (1500, 1009)), "cube": value_of("cube", (300, 70, 101)), **few}


def save_by_columns(rank: int, world_size: int, folder: str) -> None:
    mesh, model = mesh_of(3), large()
    for name, dim in (("w", 1), ("cube", 2), ("b", 0)):
        model[name] = put(model[name], mesh, [Shard(dim)])
    fc.save(folder, model=model, optimizer={"m": torch.ones(3)}, extra={"rank": rank}, step=7)


def test_large_tensors_cut_by_columns(tmp_path: Path) -> None:
    """The blocks of the old pieces lie across those of the new ones. Optimizer and extra state stay where they are."""
    run_on_ranks(save_by_columns, 3, folder=str(tmp_path))
    for number, options in enumerate(TARGETS.values()):
        assert_loads(convert(tmp_path / "step-00000007", tmp_path / f"{number}", **options), large())
        found = describe(tmp_path / f"{number}")
        assert (found.step, found.extra, {one.section for one in found.tensors}) == (7, {}, {"model"})
    stored = safetensors.torch.load_file(tmp_path / "0" / "model.safetensors")
    for name, value in large().items():
        assert_bits(name, stored[name], value)


def test_tied_names_and_values_come_along(tmp_path: Path) -> None:
    weight = value_of("w", (4, 4))
    model = {"embed": weight, "head": weight, "count": 3}
    fc.save(tmp_path / "old", model=model)
    convert(tmp_path / "old", tmp_path / "new")
    assert [(one.name, one.aliases) for one in describe(tmp_path / "new").tensors] == [("embed", ("head",))]
    assert_loads(tmp_path / "new", model)


def test_to_bfloat16(tmp_path: Path) -> None:
    """Integers, fp8 and the optimizer keep their dtypes."""
    model = {
        "f32": value_of("a", (40, 3)),
        "f16": value_of("b", (5,), torch.float16),
        "fp8": value_of("c", (5,), torch.float8_e4m3fn),
        "int": value_of("d", (5,), torch.int64),
    }
    fc.save(tmp_path / "old", model=model)
    for target in TARGETS.values():
        folder = convert(tmp_path / "old", tmp_path / str(target), dtype=torch.bfloat16, **target)
        expected = {key: value.bfloat16() if key in ("f32", "f16") else value for key, value in model.items()}
        assert_loads(folder, expected)


# --- other formats and places -----------------------------------------------------------------------------------------


def test_hugging_face_both_ways(tmp_path: Path) -> None:
    """Their folder becomes ours, and what is made of that is one of theirs again."""
    weights = {f"layers.{number}.w": value_of(str(number), (5, 4)) for number in range(5)}
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "ours")
    assert_loads(tmp_path / "ours", weights)
    convert(tmp_path / "ours", tmp_path / "theirs", max_file_bytes=200)
    index = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 400}
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "theirs" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert_bits(name, opened.get_tensor(name), weights[name])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of 2 MB."""
    fc.save(tmp_path / "old", model={"w": value_of("w", (1000, 500))}, step=1)
    return tmp_path / "old" / "step-00000001"


def test_what_was_there_stays_until_the_new_one_is_complete(old: Path, tmp_path: Path) -> None:
    fc.save(tmp_path / "new", model={"v": torch.ones(2)})
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        convert(old, tmp_path / "new")
    convert(old, tmp_path / "new", overwrite=True)
    assert [one.name for one in describe(tmp_path / "new").tensors] == ["w"]
    flip(old / "model-rank-00000-of-00001.safetensors", 1_500_000)
    for options in TARGETS.values():
        with pytest.raises(CorruptError, match="'w'"):
            convert(old, tmp_path / "new", overwrite=True, **options)
    verify(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


# --- whole processes --------------------------------------------------------------------------------------------------


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


BOUNDED = """
import sys
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.inspection import verify
import torch; torch.zeros(1).double().isnan()
def status(key):  # not ru_maxrss, which begins at the peak of the parent
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) // 1024
before = status("VmRSS")
steps = []
for work in (lambda: convert(sys.argv[1], sys.argv[2]), lambda: verify(sys.argv[2])):
    work()
    steps.append(status("VmHWM") - before)
print(*steps)
"""


@pytest.mark.exhaustive
def test_memory_is_bounded(tmp_path: Path) -> None:
    """One tensor of 240 MB goes through a process that has much less."""
    fc.save(tmp_path / "old", model={"w": torch.zeros(6000, 10_000)})
    done = run(BOUNDED, tmp_path / "old", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    growth_mb = [int(number) for number in done.stdout.split()]
    assert max(growth_mb) < 100, growth_mb
