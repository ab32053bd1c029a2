"""Low-rank adaptation of linear layers (Hu et al. 2021, https://arxiv.org/abs/2106.09685), on sharded weights.

Imported by `finetune.py`. The frozen weight keeps its name, so a checkpoint of the base model still fits:

    layers.0.q_proj.weight    [out, in]    frozen, from the base model
    layers.0.q_proj.lora_a    [rank, in]   trained, random at first
    layers.0.q_proj.lora_b    [out, rank]  trained, zero at first: training starts at the base model
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from runtime import UsageError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class LoRALinear(nn.Linear):
    """`base` with `scale * lora_b @ lora_a` on top of its weight."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))
        self.reset_lora()

    def reset_lora(self) -> None:
        """The first values of what is trained."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The weight of a plain layer that does the same, sharded like `weight`. Collective: gathers `lora_a`."""
        a = self.lora_a
        if isinstance(a, DTensor):  # rows of the product are rows of lora_b, which are cut as those of the weight
            a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
        return self.weight + self.scale * (self.lora_b @ a)


def add_lora(model: nn.Module, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Replace all linear layers whose last name is one of `targets`. Before sharding, on the meta device or not."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen = [name for name in linears if name.rpartition(".")[2] in targets]
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise UsageError(f"--lora-targets {' '.join(targets)} names no linear layer of this model; it has {known}")
    for name in chosen:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(linears[name], rank, alpha))


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """All adapted layers, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module
