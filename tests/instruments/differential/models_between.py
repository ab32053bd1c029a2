"""Modules with which programs do things between steps, or should not do within one."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.instruments.differential.models import DIM, Block, Embed, Lin


class Kept(Block):
    """Keeps a tensor that a later loss may read; between it and the output is another layer."""

    kept: Any = None

    def __init__(self, first: str) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(DIM))
        self.first = nn.Linear(DIM, DIM) if first == "lin" else nn.Identity()
        self.last = nn.Linear(DIM, DIM)

    def compute(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.first(x) + self.shift)
        return self.last(self.kept)


class Masked(Lin):
    """Writes a mask into its weight in each forward."""

    def compute(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lin.weight.mul_(torch.ones(DIM, DIM).tril())
        return super().compute(x)


class MaxNorm(Embed):
    """Makes the rows that it looks up shorter."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.table.max_norm = 0.5
