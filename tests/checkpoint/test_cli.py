"""``python -m fsdp2.checkpoint``, and the functions behind it: what is in a checkpoint, what is wrong with it.
Damage is made in real files; every kind of it has to be named."""

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
from fsdp2 import fully_shard
from fsdp2.checkpoint.tools.cli import main
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.describing import describe
from fsdp2.checkpoint.tools.inspection import verify
from fsdp2.errors import CorruptError
from tests.helpers.checkpoint_cases import value_of
from tests.helpers.hostile_checkpoints import flip
from tests.helpers.ranks import run_on_ranks

MODEL, OPTIMIZER = (f"{kind}-rank-00001-of-00003.safetensors" for kind in ("model", "optimizer"))


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
    fc.save(root / "whole", model=model, optimizer=optimizer, consolidated=True, max_file_bytes=2_000_000)
    run_on_ranks(save_sharded, 3, folder=str(root / "three"), extra=extra)
    return root


def save_sharded(rank: int, world_size: int, folder: str, extra: dict[str, Any]) -> None:
    model, _ = build()
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    fc.save(folder, model=model, optimizer=optimizer, extra=extra)


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


# --- describe ---------------------------------------------------------------------------------------------------------


def test_describe_shows_what_is_there(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capsys, "describe", original / "run", "--tensors", "*0.weight")
    lines = out.splitlines()
    assert code == 0
    assert "format fsdp2 ranks, step 5, ranks 1, id " in lines[0]
    assert lines[0].endswith("optimizer AdamW, extra loader, note")
    assert lines[1:] == [
        "  model: 5 tensors, 3.61 MB, F32, I64",
        "  optimizer: 12 tensors, 7.22 MB, F32",
        "  model 0.weight: F32 [3000, 300], 3.6 MB",
        "  optimizer step.0.weight: F32 [], 4 B",
        "  optimizer exp_avg.0.weight: F32 [3000, 300], 3.6 MB",
        "  optimizer exp_avg_sq.0.weight: F32 [3000, 300], 3.6 MB",
    ]


def test_describe_a_run(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders / "run"
    convert(run / "step-00000005", run / "step-00000010")
    code, out = cli(capsys, "describe", run)
    assert code == 0
    assert re.findall(r"step-\d+", out) == ["step-00000005", "step-00000010"]
    flip(run / "step-00000005" / "checkpoint.json", 300)
    code, out = cli(capsys, "describe", run)
    assert code == 1
    assert "step-00000010: format fsdp2" in out
    assert out.startswith(f"{run}/step-00000005/checkpoint.json: ")


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run/step-00000005", "three", "whole"])
def test_verify_reads_every_byte_of_a_sound_checkpoint(original: Path, name: str) -> None:
    report = verify(original / name)
    assert report.checked_bytes == 10_836_456 + 200 * (name != "whole")
    assert (report.unchecked_bytes, report.num_tensors) == (0, 17)


@pytest.mark.parametrize("name", ["three", "whole"])
def test_no_byte_of_the_values_can_change_unnoticed(folders: Path, name: str) -> None:
    """In each file the first byte of the data, the last, and one in between. Files of others are no damage."""
    (folders / name / "config.json").write_text("{}")
    verify(folders / name)
    for file in sorted((folders / name).glob("*.safetensors")):
        begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        for at in {begin, (begin + file.stat().st_size) // 2, file.stat().st_size - 1}:
            flip(file, at)
            with pytest.raises(CorruptError, match=rf"{file.name}: '.* is damaged: bytes .* have checksum "):
                verify(folders / name)
            flip(file, at)


def changed(name: str, at: int) -> Callable[[Path], None]:
    return lambda folder: flip(folder / name, at)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    # folder, what happens, what is said
    "missing": ("three", lambda f: (f / MODEL).unlink(), f"{MODEL}: is missing"),
    "link": ("three", lambda f: ((f / MODEL).rename(f / "away"), (f / MODEL).symlink_to("away")), MODEL),
    "cut": ("three", lambda f: os.truncate(f / OPTIMIZER, 20_000), f"{OPTIMIZER}: has 20000 bytes"),
    "header": ("three", changed(MODEL, 60), f"{MODEL}: the header"),
    "length": ("three", changed(MODEL, 3), f"{MODEL}: claims a header"),
    "extra": ("three", lambda f: [file.unlink() for file in f.glob("extra*")], "extra-.*is missing"),
    "manifest": ("three", changed("checkpoint.json", 500), "checkpoint.json: "),
    "index": ("whole", changed("model.safetensors.index.json", 40), "model.safetensors.index.json: has checksum"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, spoil, problem = DAMAGE[case]
    spoil(folders / name)
    with pytest.raises(CorruptError, match=problem) as raised:
        verify(folders / name)
    assert cli(capsys, "verify", folders / name) == (1, f"{raised.value}\n")


def test_verify_takes_a_run(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders / "run"
    fc.save(run, model={"w": torch.ones(100_000)}, step=6)
    code, out = cli(capsys, "verify", run)
    assert (code, len(re.findall("^whole ", out, re.M))) == (0, 2)
    flip(run / "step-00000006" / "model-rank-00000-of-00001.safetensors", 100_000)
    code, out = cli(capsys, "verify", run)
    assert (code, len(re.findall("^whole ", out, re.M))) == (1, 1)
    assert fc.latest(run) == str(run / "step-00000006")
    assert fc.latest(run, valid=verify) == str(run / "step-00000005")


def test_other_formats_are_read_as_far_as_that_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    expected = f"readable {tmp_path}: 1 tensors, 4 kB read that have no checksums\n"
    assert cli(capsys, "verify", tmp_path) == (0, expected)
    os.truncate(tmp_path / "model.safetensors", 2000)
    assert cli(capsys, "verify", tmp_path)[0] == 1


# --- convert, messages ------------------------------------------------------------------------------------------------


def test_convert(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capsys, "convert", original / "three", tmp_path / "new", "--dtype", "bf16")
    assert (code, out) == (0, f"{tmp_path}/new\n")
    assert {one.dtype for one in describe(tmp_path / "new").tensors} == {"BF16", "I64"}
    assert main(["convert", str(original / "three"), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.endswith("Save to another folder, or pass --overwrite.\n")
    assert cli(capsys, "convert", original / "three", tmp_path / "new", "--overwrite")[0] == 0
    assert {one.dtype for one in describe(tmp_path / "new").tensors} == {"F32", "I64"}


def test_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["verify", tmp_path], ["prune", tmp_path, "--keep", 0]):
        assert main([str(arg) for arg in args]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    for args in ([], ["explode"], ["verify"]):
        with pytest.raises(SystemExit) as raised:
            main(args)
        assert raised.value.code == 2
