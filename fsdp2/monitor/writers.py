"""Where measurements go: each writer is a few lines on the library of those who show them. Layer: monitor.

None of these libraries is a dependency: a writer imports its own when it is made.
"""

import json
import re
from collections.abc import Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from fsdp2.errors import UnsupportedError

__all__ = ["JsonLines", "MLflow", "TensorBoard", "WandB", "Writer"]


class Writer(Protocol):
    """What `Monitor` calls, on the rank that writes."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of a step, by names such as ``grad_norm/layers.0``."""

    def close(self) -> None:
        """There will be no more."""


class JsonLines:
    """A line of JSON for each measured step, at the end of a file, whose folder is made.

    Example::

        JsonLines("runs/first/measured.jsonl")
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = Path(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """See `Writer`."""


class TensorBoard:
    """Scalars for TensorBoard, by `torch.utils.tensorboard`.

    Args:
        folder: the log directory.
        options: of `SummaryWriter`.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """

    def __init__(self, folder: str | PathLike[str], **options: Any) -> None:
        module = _library("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, by its own library.

    Args:
        options: of `wandb.init`, such as `project`, `name`, `config` and `mode`.

    Raises:
        UnsupportedError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._run = _library("wandb", "wandb").init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Writer`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, by its own library, at the tracking URI that is set.

    A ``/`` in a name becomes a dot, and what MLflow allows in no name is left out: ``grad_norm.layers.0``. (Its folders
    cannot hold both ``grad_norm`` and ``grad_norm/layers.0``.)

    Args:
        options: of `mlflow.start_run`, such as `run_name` and `experiment_id`.

    Raises:
        UnsupportedError: mlflow is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow = _library("mlflow", "mlflow")
        self._run = self._mlflow.start_run(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        named = {re.sub(r"[^\w.\- ]+", "", name.replace("/", ".")): value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        """See `Writer`."""
        self._mlflow.end_run()


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"monitor: this writer needs {package}: pip install {package}") from error
