"""Sharded checkpoints of a training run, by plain `torch.distributed.checkpoint`.

Imported by `train_lm.py`. In a run's folder:

    checkpoints/step-000200/__0_0.distcp ...   one file per rank: its shards of the weights and optimizer states
    checkpoints/step-000200/.metadata          where each tensor lies in those files
    checkpoints/step-000200/run.json           step, model config, options: readable without loading anything
    checkpoints/.step-000400.partial/          a save that is under way, or was cut off; never loaded

A folder gets its final name by a rename after all ranks have written, so whatever has such a name is complete, and an
interrupted save leaves the previous checkpoint as it was. A checkpoint can be loaded at another world size.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import LMConfig
from runtime import UsageError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk and what its run.json says."""

    path: Path
    step: int
    model: dict[str, Any]
    run: dict[str, Any]


def save(run_folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> Path:
    """Write a checkpoint of `saved["step"]` steps and return its folder. Collective."""
    final = run_folder / FOLDER / f"step-{saved['step']:06d}"
    partial = final.with_name(f".{final.name}.partial")
    leads = dist.get_rank() == 0
    if leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    dist.barrier()
    if leads:
        (partial / "run.json").write_text(json.dumps(saved, indent=1))
        replaced = final.with_name(f".{final.name}.replaced")
        if final.exists():  # a run that was resumed from an earlier step has come here a second time
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()
    return final


def find(path: Path) -> Saved:
    """The checkpoint at `path`, or the newest complete one of the run in the folder `path`."""
    candidates = [path] if (path / "run.json").is_file() else sorted((path / FOLDER).glob("step-*"), reverse=True)
    for folder in candidates:
        if (folder / ".metadata").is_file() and (folder / "run.json").is_file():
            return _read(folder)
    raise UsageError(f"no complete checkpoint in {path}")


def _read(folder: Path) -> Saved:
    try:
        content = json.loads((folder / "run.json").read_text())
        return Saved(folder, int(content["step"]), dict(content["model"]), dict(content["run"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / 'run.json'} does not describe a checkpoint of this program ({error})") from error


def check_same_model(saved: Saved, config: LMConfig) -> None:
    """Raise UsageError, naming the settings that differ, unless the checkpoint was made of a model like `config`."""
    now = asdict(config)
    differing = [
        f"{name} is {saved.model.get(name, 'unknown')} there and {now.get(name, 'unknown')} here"
        for name in sorted(saved.model.keys() | now.keys())
        if saved.model.get(name) != now.get(name)
    ]
    if differing:
        raise UsageError(f"{saved.path} is a checkpoint of another model: {'; '.join(differing)}")


def load(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the shards of this rank into `model` and `optimizer`. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=saved.path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
