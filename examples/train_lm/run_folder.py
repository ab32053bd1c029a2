"""The folder of a run, before training starts: which checkpoint to go on from, and room for the new files.

Imported by `train_lm.py` and `finetune.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import checkpoint
from reporting import CURVE, METRICS
from runtime import UsageError

FILES = (METRICS, CURVE)  # of a run, beside its checkpoints


class Resumable(Protocol):
    """The options that are read here."""

    out: Path
    resume: Path | None
    auto_resume: bool
    steps: int


def find_checkpoint(options: Resumable, model: Mapping[str, Any]) -> checkpoint.Saved | None:
    """The checkpoint that `--resume` or `--auto-resume` asks for, checked against this run, and the settings of its
    model, before any tensor is loaded. Every rank calls."""
    if options.resume is not None:
        path = options.resume
    elif options.auto_resume and checkpoint.exists(options.out):
        path = options.out
    else:
        return None
    saved = checkpoint.find(path)
    checkpoint.check_same_model(saved, model)
    # A launcher may start a job again that was through: then there is nothing left to do, and nothing wrong.
    complete = options.auto_resume and saved.step == options.steps
    if saved.step >= options.steps and not complete:
        raise UsageError(
            f"{saved.path} has done {saved.step} of {options.steps} steps already; "
            "--steps counts those before a resume too: raise it to go on"
        )
    return saved


def prepare_folder(out: Path, saved: checkpoint.Saved | None, results: Sequence[str] = ()) -> None:
    """Create `out`; files of another run in it, and `results`, move to a subfolder: two runs' checkpoints must never
    mix. If the run goes on here from before its end, so do the later checkpoints: the next resume takes the newest. On
    rank 0 alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        goes_on_here = saved is not None and saved.path.parent.resolve() == (out / checkpoint.FOLDER).resolve()
        if saved is not None and goes_on_here:
            present = [path for path in saved.path.parent.glob("step-*") if path.name > saved.path.name]
        else:
            present = [out / name for name in (checkpoint.FOLDER, *FILES, *results) if (out / name).exists()]
        set_aside(out, present)
    except OSError as error:
        raise UsageError(f"cannot write to --out {out}: {error.strerror}") from error


def set_aside(out: Path, present: Sequence[Path]) -> None:
    """Move these into a new subfolder of `out`. On rank 0 alone."""
    if not present:
        return
    numbers = [path.name.removeprefix("previous-") for path in out.glob("previous-*")]
    previous = out / f"previous-{1 + max((int(number) for number in numbers if number.isdecimal()), default=0)}"
    previous.mkdir()
    for path in present:
        path.rename(previous / path.name)
    print(f"moved {', '.join(path.name for path in present)} to {previous}", flush=True)
