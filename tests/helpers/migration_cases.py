"""A model and its step, for what documents say of settings; and the tables of a document."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.helpers.parity_models import batch

DIM, LAYERS = 8, 3
MICROBATCHES = 5


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(path: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(heading of level 2, header, rows) of each table."""
    section, lines = "", [*path.read_text(encoding="utf-8").splitlines(), ""]
    for index, line in enumerate(lines):
        if line.startswith("## "):
            section = line[3:]
        if re.fullmatch(r"\|(-+:?\|)+", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[index + 1 :])
            yield section, cells(lines[index - 1]), [cells(row) for row in rows]


def stack(dim: int = DIM) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(LAYERS)))


def shard(model: nn.Module | None = None, **options: Any) -> Any:
    """Each child is a unit, and then the root; of `stack()` without a model."""
    model = stack() if model is None else model
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def run(model: nn.Module, rank: int, index: int = 0) -> Tensor:
    """Forward and backward of one batch."""
    loss = model(batch(index, rank)).float().square().mean()
    loss.backward()
    return loss.detach()


def step_with_flag(model: Any, rank: int) -> None:
    """The microbatches of a step under a `ZeroPolicy`."""
    for index in range(MICROBATCHES):
        model.set_is_last_backward(index == MICROBATCHES - 1)
        run(model, rank, index)
