"""Sharded checkpoints of a training run, by `fsdp2.checkpoint`.

Imported by `train_lm.py` and `finetune.py`. In a run's folder:

    checkpoints/step-00000200/model-rank-00000-of-00002.safetensors ...   one file a rank: its shards of the weights
    checkpoints/step-00000200/optimizer-rank-...                          and of the optimizer's state
    checkpoints/step-00000200/extra-rank-...                              random numbers
    checkpoints/step-00000200/checkpoint.json                             what is where; step, model config, options
    checkpoints/.tmp-step-00000400-.../                                   a save that is under way, or was cut off

A folder gets its final name when all ranks have written, so an interrupted save leaves the previous checkpoint as it
was. A checkpoint can be loaded by another number of ranks. `python -m fsdp2.checkpoint describe FOLDER` shows what is
inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reporting import Report
from runtime import UsageError
from torch import nn

from fsdp2 import CheckpointError
from fsdp2.checkpoint import RandomState, SaveHandle, latest, prune
from fsdp2.checkpoint import load as load_checkpoint
from fsdp2.checkpoint import save as save_checkpoint

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk and what it says of the run that wrote it."""

    path: Path
    step: int
    model: dict[str, Any]
    run: dict[str, Any]


def save(run_folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> SaveHandle:
    """Begin a checkpoint of `about["step"]` steps: the shards are copied, then written in the background. Every rank
    calls this; none waits for the others."""
    return save_checkpoint(
        run_folder / FOLDER,
        model=model,
        optimizer=optimizer,
        extra={"about": about, "random": RandomState()},
        step=about["step"],
        async_op=True,
        overwrite=True,  # a run that was resumed from an earlier step comes here a second time
    )


class Saver:
    """The checkpoints of a run, written in the background one after the other. Every rank calls all methods."""

    def __init__(self, run_folder: Path, saved: Saved | None, report: Report, keep: int, leads: bool) -> None:
        self._folder, self._report, self._keep, self._leads = run_folder, report, keep, leads
        self._step = saved.step if saved is not None else 0
        self._pending: SaveHandle | None = None
        self.newest = str(saved.path) if saved is not None else None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> None:
        """Begin a checkpoint of `about["step"]` steps, unless there is one."""
        if about["step"] == self._step:
            return
        self.finish()
        self._pending = save(self._folder, model, optimizer, about)
        self._step = about["step"]
        self._report.note(f"step {self._step:>5}  saving {self._pending.folder}")

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; only then may those before the newest `keep` go."""
        if self._pending is not None:
            self.newest = self._pending.wait()
            self._pending = None
            if self._leads and self._keep:
                prune(self._folder / FOLDER, self._keep)


def exists(run_folder: Path) -> bool:
    """Whether the run in the folder has a complete checkpoint."""
    return latest(run_folder / FOLDER) is not None


def find(path: Path) -> Saved:
    """The checkpoint at `path`, or the newest complete one of the run in the folder `path`. Every rank calls this."""
    folder = latest(path / FOLDER) or str(path)
    try:
        found = load_checkpoint(folder)
        about = found.extra["about"]
        return Saved(Path(folder), int(about["step"]), dict(about["model"]), dict(about["run"]))
    except CheckpointError as error:
        raise UsageError(f"no complete checkpoint in {path} ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} is not a checkpoint of this program ({error!r})") from error


def check_same_model(saved: Saved, now: Mapping[str, Any]) -> None:
    """Raise UsageError, naming the settings that differ, unless those of the checkpoint's model are the ones of now."""
    differing = [
        f"{name} is {saved.model.get(name, 'unknown')} there and {now.get(name, 'unknown')} here"
        for name in sorted(saved.model.keys() | now.keys())
        if saved.model.get(name) != now.get(name)
    ]
    if differing:
        raise UsageError(f"{saved.path} is a checkpoint of another model: {'; '.join(differing)}")


def load(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the shards of this rank into `model` and `optimizer`, and the random numbers. What the command line says of
    the optimizer counts, not what the checkpoint says. Every rank calls this."""
    wanted = [{name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups]
    load_checkpoint(saved.path, model=model, optimizer=optimizer, extra={"random": RandomState()})
    for group, settings in zip(optimizer.param_groups, wanted, strict=True):
        group.update(settings)
