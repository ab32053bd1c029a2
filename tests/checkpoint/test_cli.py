"""``python -m fsdp2.checkpoint``, and the functions behind it: what is in a checkpoint, what is wrong with it.
Damage is made in real files; every kind of it has to be named."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fsdp2.checkpoint as fc
from fsdp2 import CheckpointError
from fsdp2.checkpoint.tools.cli import main
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.describing import describe
from fsdp2.checkpoint.tools.inspection import Damage, find_damage, verify
from fsdp2.errors import CorruptError
from tests.helpers.checkpoint_cases import value_of
from tests.helpers.dcp_saves import save_dcp

MODEL, OPTIMIZER, EXTRA = (f"{kind}-rank-00001-of-00003.safetensors" for kind in ("model", "optimizer", "extra"))


def build() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 3000), torch.nn.Linear(8, 4))
    model.register_buffer("count", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for name, param in model.named_parameters():
        param.data = value_of(name, param.shape)
        param.grad = value_of(name, param.shape)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one checkpoint, of one rank, and beside it the same of three, and consolidated."""
    root = tmp_path_factory.mktemp("original")
    model, optimizer = build()
    extra = {"loader": {"epoch": 2, "order": value_of("order", (50,))}, "note": "first"}
    fc.save(root / "run", model=model, optimizer=optimizer, extra=extra, step=5)
    convert(root / "run" / "step-00000005", root / "three", world=3)
    convert(root / "run" / "step-00000005", root / "whole", to="consolidated", max_file_bytes=2_000_000)
    return root


@pytest.fixture
def folders(original: Path, tmp_path: Path) -> Path:
    """Copies that may be damaged."""
    subprocess.run(["cp", "-r", f"{original}/.", tmp_path], check=True)
    return tmp_path


def cli(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """(exit code, standard output)."""
    capsys.readouterr()
    code = main([str(arg) for arg in args])
    return code, capsys.readouterr().out


def cells(out: str) -> list[list[str]]:
    """The cells of tables: two spaces or more divide them."""
    return [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if line.strip()]


def flip(file: Path, *places: int) -> None:
    data = bytearray(file.read_bytes())
    for at in places:
        data[at] ^= 1
    file.write_bytes(data)


# --- describe ---------------------------------------------------------------------------------------------------------


def test_describe_shows_what_is_there(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capsys, "describe", original / "three", "--tensors", "*0.weight")
    assert code == 0
    rows = cells(out)
    assert ["model", "5", "903,037", "3.61 MB", "F32, I64"] in rows
    assert ["optimizer", "12", "1,806,076", "7.22 MB", "F32"] in rows
    assert ["model", "0.weight", "F32", "[3000, 300]", "3.6 MB", "3"] in rows
    assert not any("1.weight" in row for row in rows)
    for fact in (
        "format     fsdp2 ranks",
        "step       5",
        "ranks      3",
        "optimizer  AdamW",
        "extra      loader, note",
    ):
        assert fact in out
    assert [MODEL, "1.21 MB"] in rows


def test_describe_as_json(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capsys, "describe", "--json", original / "whole")
    found = json.loads(out)
    assert code == 0
    assert (found["layout"], found["world"], found["step"], found["nbytes"]) == ("consolidated", 1, 5, 10_836_456)
    names = {tensor["name"]: tensor["shape"] for tensor in found["tensors"] if tensor["section"] == "model"}
    assert names == {"0.weight": [3000, 300], "0.bias": [3000], "1.weight": [4, 8], "1.bias": [4], "count": []}
    assert found["extra"] == {"loader": [1, 1], "note": [1, 1]}


def test_describe_needs_the_manifest_alone(folders: Path) -> None:
    before = describe(folders / "three")
    for file in (folders / "three").glob("*.safetensors"):
        file.unlink()
    assert describe(folders / "three") == before


def test_describe_a_run(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders / "run"
    convert(run / "step-00000005", run / "step-00000010", world=2)
    code, out = cli(capsys, "describe", run)
    assert code == 0
    assert ["step-00000005", "5", "1", "ranks", "17", "10.8 MB"] in cells(out)
    assert ["step-00000010", "5", "2", "ranks", "17", "10.8 MB"] in cells(out)
    flip(run / "step-00000005" / "checkpoint.json", 300)
    code, out = cli(capsys, "describe", run)
    assert code == 1
    assert "step-00000010" in out
    assert f"damaged: {run}/step-00000005/checkpoint.json: " in out


def test_describe_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.torch.save_file({"a\x1b[1m": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    code, out = cli(capsys, "describe", tmp_path, "--tensors")
    assert code == 0
    assert "Hugging Face" in out
    assert ["model", "a\N{REPLACEMENT CHARACTER}[1m", "F32", "[2, 3]", "24 B", "1"] in cells(out)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run/step-00000005", "three", "whole"])
def test_verify_reads_every_byte_of_a_sound_checkpoint(original: Path, name: str) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(original / name, progress=lambda done, total: calls.append((done, total)))
    assert report.ok
    assert report.checked_bytes == 10_836_456 + 200
    assert (report.unchecked_bytes, report.strays, report.num_tensors) == (0, [], 17)
    assert calls[-1] == (10_836_456, 10_836_456)


@pytest.mark.parametrize("name", ["three", "whole"])
def test_no_byte_of_the_values_can_change_unnoticed(folders: Path, name: str) -> None:
    """In each file the first byte of the data, the last, and one in between."""
    for file in sorted((folders / name).glob("*.safetensors")):
        begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        for at in {begin, (begin + file.stat().st_size) // 2, file.stat().st_size - 1}:
            flip(file, at)
            (damage,) = find_damage(folders / name).damage
            assert damage.file == file.name
            assert damage.span is not None
            assert damage.span[0] <= at < damage.span[1]
            assert len(damage.tensors) == 1
            assert damage.problem.startswith("checksum")
            flip(file, at)


def changed(name: str, at: int) -> Callable[[Path], None]:
    return lambda folder: flip(folder / name, at)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str, str, int]] = {
    # folder, what happens, file that is named, what is said, how many tensors are named
    "missing": ("three", lambda f: (f / MODEL).unlink(), MODEL, "cannot be opened", 4),
    "link": ("three", lambda f: ((f / MODEL).rename(f / "away"), (f / MODEL).symlink_to("away")), MODEL, "cannot", 4),
    "cut": ("three", lambda f: os.truncate(f / OPTIMIZER, 20_000), OPTIMIZER, "has 20000 bytes", 8),
    "longer": ("three", lambda f: os.truncate(f / OPTIMIZER, 9_000_000), OPTIMIZER, "has 9000000 bytes", 8),
    "header": ("three", changed(MODEL, 60), MODEL, "the header", 4),
    "length": ("three", changed(MODEL, 3), MODEL, "claims a header", 4),
    "other rank": (
        "three",
        lambda f: (f / MODEL).write_bytes((f / MODEL.replace("00001-of", "00000-of")).read_bytes()),
        MODEL,
        "",
        4,
    ),
    "extra": (
        "three",
        lambda f: (f / "extra-rank-00000-of-00001.safetensors").unlink(),
        "extra-rank",
        "cannot be opened",
        2,
    ),
    "manifest": ("three", changed("checkpoint.json", 500), "checkpoint.json", "", 0),
    "index": ("whole", changed("model.safetensors.index.json", 40), "model.safetensors.index.json", "checksum", 0),
    "whole header": ("whole", changed("model-00002-of-00003.safetensors", 30), "model-00002", "header", 1),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, spoil, file, problem, num_tensors = DAMAGE[case]
    spoil(folders / name)
    (damage,) = [damage for damage in find_damage(folders / name).damage if damage.file.startswith(file)]
    assert problem in damage.problem
    assert len(damage.tensors) == num_tensors
    with pytest.raises(CorruptError, match=re.escape(damage.file)):
        verify(folders / name)
    code, out = cli(capsys, "verify", folders / name)
    assert code == 1
    assert "is damaged" in out


def test_all_damage_is_listed(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only the first; neighbouring blocks count as one."""
    three = folders / "three"
    (three / OPTIMIZER).unlink()
    flip(three / MODEL, 20_000)
    last = three / MODEL.replace("00001-of", "00002-of")
    flip(last, *range(8_000, last.stat().st_size, 1000))
    found = find_damage(three).damage
    assert [damage.file for damage in found] == [OPTIMIZER, MODEL, last.name, last.name]
    spans = [damage.span for damage in found]
    assert spans[0] is None
    assert all(span is not None for span in spans[1:])
    assert len(found[0].tensors) == 8
    assert spans[2] != spans[3]
    code, out = cli(capsys, "verify", "--json", three)
    report = json.loads(out)["reports"][0]
    assert code == 1
    assert [
        Damage(**{**one, "tensors": tuple(one["tensors"]), "span": one["span"] and tuple(one["span"])})
        for one in report["damage"]
    ] == found


def test_files_that_do_not_belong_there_are_no_damage(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user may put a tokenizer beside the weights; rank files of a larger world are never read."""
    (folders / "three" / "config.json").write_text("{}")
    (folders / "three" / "model-rank-00003-of-00004.safetensors").write_bytes(b"")
    code, out = cli(capsys, "verify", folders / "three")
    assert code == 0
    assert "not of the checkpoint: config.json, model-rank-00003-of-00004.safetensors" in out
    assert cli(capsys, "verify", "--strict", folders / "three")[0] == 1
    assert describe(folders / "three").strays == ("config.json", "model-rank-00003-of-00004.safetensors")


def test_verify_takes_runs_and_several_folders(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(folders / "run" / "step-00000005", folders / "run" / "step-00000006")
    code, out = cli(capsys, "verify", folders / "run", folders / "whole")
    assert code == 0
    assert len(re.findall("^whole ", out, re.M)) == 3
    flip(folders / "run" / "step-00000006" / "model-rank-00000-of-00001.safetensors", 100_000)
    code, out = cli(capsys, "verify", folders / "run", folders / "whole")
    assert code == 1
    assert len(re.findall("^whole ", out, re.M)) == 2
    assert fc.latest(folders / "run") == str(folders / "run" / "step-00000006")
    assert fc.latest(folders / "run", valid=verify) == str(folders / "run" / "step-00000005")


def test_other_formats_are_read_as_far_as_that_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    code, out = cli(capsys, "verify", tmp_path)
    assert code == 0
    assert "4 kB read; their values cannot be checked: Hugging Face has no checksums" in out
    os.truncate(tmp_path / "model.safetensors", 2000)
    (damage,) = find_damage(tmp_path).damage
    assert damage.file == "model.safetensors"
    assert cli(capsys, "verify", tmp_path)[0] == 1


# --- messages, other libraries ----------------------------------------------------------------------------------------


def test_messages_name_flags(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error advised ``overwrite=True``, which the command does not know."""
    assert main(["convert", str(folders / "three"), str(folders / "whole")]) == 2
    assert capsys.readouterr().err.endswith("Save to another folder, or pass --overwrite.\n")


def test_runs_of_other_libraries(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`describe` of a folder of them said that there was no checkpoint, and `verify` of one in DCP's format "whole, 0 B
    checked": it has no checksums."""
    run = tmp_path / "torchtitan"
    for step in (1000, 500, 20):
        save_dcp(run / f"step-{step}", {"model": {"w": torch.ones(3)}})
    code, out = cli(capsys, "describe", run)
    assert code == 0
    assert re.findall(r"step-\d+", out) == ["step-20", "step-500", "step-1000"]
    assert out.count("DCP") == 3
    code, out = cli(capsys, "verify", run)
    assert code == 0
    assert out.count("readable") == 3 and "whole" not in out and "has no checksums" in out
    code, out = cli(capsys, "describe", run / "step-20")
    assert code == 0 and "DCP" in out
    assert main(["describe", str(tmp_path / "nowhere")]) == 2


# --- convert, prune ---------------------------------------------------------------------------------------------------


def test_convert(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--to", "consolidated", "--dtype", "bf16", "--max-file-size", "1.5MB", "--model-only")
    code, out = cli(capsys, "convert", original / "three", tmp_path / "new", *options)
    assert (code, out) == (0, f"{tmp_path}/new\n")
    assert sorted(path.name for path in tmp_path.glob("new/model*")) == [
        "model-00001-of-00003.safetensors",  # the count, a weight that is larger than that, and the rest
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert {one.dtype for one in describe(tmp_path / "new").tensors} == {"BF16", "I64"}
    code, out = cli(capsys, "convert", original / "three", tmp_path / "two", "--world", 2, "--json")
    assert (code, json.loads(out)) == (0, {"folder": f"{tmp_path}/two"})
    assert cli(capsys, "convert", original / "three", tmp_path / "two")[0] == 2
    assert cli(capsys, "convert", original / "three", tmp_path / "two", "--overwrite")[0] == 0
    assert describe(tmp_path / "two").world == 1


def test_prune(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders / "run"
    for step in (10, 15, 20):
        convert(run / "step-00000005", run / f"step-000000{step}", model_only=True)
    names = sorted(os.listdir(run))
    code, out = cli(capsys, "prune", run, "--keep", 1, "--every", 10, "--dry-run")
    assert code == 0
    assert out.splitlines() == [
        f"would delete {run}/step-00000005",
        f"would delete {run}/step-00000015",
    ]
    assert sorted(os.listdir(run)) == names
    code, out = cli(capsys, "prune", run, "--keep", 1, "--every", 10, "--json")
    assert code == 0
    expected = {"deleted": True, "checkpoints": [f"{run}/step-00000005", f"{run}/step-00000015"]}
    assert json.loads(out) == expected
    assert sorted(os.listdir(run)) == ["step-00000010", "step-00000020"]
    assert cli(capsys, "prune", run, "--keep", 5) == (0, "nothing to delete\n")


# --- calls that cannot work -------------------------------------------------------------------------------------------


def test_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["verify", tmp_path],
        ["describe", tmp_path / "no"],
        ["prune", tmp_path, "--keep", 0],
        ["prune", tmp_path, "--keep", 1, "--every", 0],
    ):
        assert main([str(arg) for arg in args]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    sizes = [["convert", "a", "b", "--max-file-size", size] for size in ("5 lots", "inf", "1e999GB")]
    for args in ([], ["explode"], ["verify"], *sizes):
        with pytest.raises(SystemExit) as raised:
            main(args)
        assert raised.value.code == 2
    assert cli(capsys, "verify", "--json", tmp_path) == (
        2,
        json.dumps({"error": f"{tmp_path}: there is no checkpoint (no checkpoint.json)"}, indent=2) + "\n",
    )
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find_damage(tmp_path)
