"""DeepSpeed folders: ZeRO-3, ZeRO-1 and 2, universal. They are made by `deepspeed_saves`, in the layout of version
0.19, with whose own files the readers were compared by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.errors import CorruptError, UnsupportedError
from tests.helpers.deepspeed_saves import loads, write_ranks, write_universal
from tests.helpers.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def loss_scaler() -> Iterator[type]:
    """A class whose pickles name a module of DeepSpeed, as its files do."""
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler"]
    for name in names:
        sys.modules[name] = ModuleType(name)
    kind = type("LossScaler", (), {"__module__": names[-1]})
    sys.modules[names[-1]].LossScaler = kind
    yield kind
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("stage", [2, 3])
def test_rank_files(tmp_path: Path, stage: int, world: int, loss_scaler: type) -> None:
    """ZeRO of any number of ranks, padded at the end of parameters or groups."""
    frozen = write_ranks(tmp_path, stage, world, loss_scaler, torch.tensor(7.0), bf16=world == 2)
    loads(0, 1, tmp_path, frozen, sharded=False)
    loads(0, 1, tmp_path / "global_step7", frozen, sharded=False)  # either folder may be named
    if world == 2:
        run_on_ranks(loads, 3, folder=tmp_path, frozen=frozen, sharded=True)


def test_integer_steps(tmp_path: Path, loss_scaler: type) -> None:
    """DeepSpeed's own Adam counts in a plain number; torch's needs a tensor."""
    frozen = write_ranks(tmp_path, 3, 2, loss_scaler, 7)
    loads(0, 1, tmp_path, frozen, sharded=False)


@pytest.mark.parametrize("zero3", [False, True])
def test_universal(tmp_path: Path, zero3: bool) -> None:
    frozen = write_universal(tmp_path, zero3)
    loads(0, 1, tmp_path, frozen, sharded=False)
    run_on_ranks(loads, 2, folder=tmp_path, frozen=frozen, sharded=True)


def test_missing_files_are_named(tmp_path: Path, loss_scaler: type) -> None:
    write_ranks(tmp_path, 3, 2, loss_scaler, torch.tensor(7.0))
    inner = tmp_path / "global_step7"
    (inner / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"1 files \*_model_states.pt of 2 ranks"):
        open_catalog(*storage_of(tmp_path))
    (inner / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"1 files \*_optim_states.pt of 2 ranks"):
        open_catalog(*storage_of(tmp_path))


def test_other_parallelism_is_refused(tmp_path: Path, loss_scaler: type) -> None:
    write_ranks(tmp_path, 2, 1, loss_scaler, torch.tensor(7.0))
    torch.save({}, tmp_path / "global_step7" / "layer_00-model_00-model_states.pt")
    with pytest.raises(UnsupportedError, match="ds_to_universal"):
        open_catalog(*storage_of(tmp_path))


def test_what_does_not_fit(tmp_path: Path, loss_scaler: type) -> None:
    """A parameter larger than what the ranks have of it, and a file that holds something else."""
    write_ranks(tmp_path, 2, 2, loss_scaler, torch.tensor(7.0))
    file = tmp_path / "global_step7" / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    states["param_shapes"][1]["first.bias"] = torch.Size((70,))
    torch.save(states, file)
    with pytest.raises(CorruptError, match=r"of 'first.bias' \[70\] the ranks have 7 elements"):
        open_catalog(*storage_of(tmp_path))
    states["param_shapes"] = "nonsense"
    torch.save(states, file)
    with pytest.raises(CorruptError, match="is malformed"):
        open_catalog(*storage_of(tmp_path))
    torch.save([1], file)
    with pytest.raises(CorruptError, match="is not a file of DeepSpeed"):
        open_catalog(*storage_of(tmp_path))


@pytest.mark.parametrize("tag", ["../other", "/etc", "a/b", ".hidden"])
def test_latest_cannot_lead_outside(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CorruptError, match="must lie in its folder"):
        open_catalog(*storage_of(tmp_path))
