"""A tiny Llama and a loop that trains it, for clients that shard models and leave the loop to a trainer which needs a
GPU, a cluster or heavy packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.clients import Run, library_of

VOCAB, LENGTH = 64, 8


def without(*names: str) -> None:
    """Packages that a client imports and these tests do not need: modules that have anything and do nothing."""
    for name in names:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    """Three layers, the same on every rank."""
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return kind(LlamaConfig(**sizes, **heads))


def tokens(seed: int, num: int = 2) -> Tensor:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(VOCAB, (num, LENGTH), generator=generator)


def whole(tensor: Any) -> Tensor:
    """All of it. Collective."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def train(
    model: nn.Module,
    *,
    steps: int = 20,
    before: Callable[[int, bool], Any] = lambda step, is_last: None,
    clip: Callable[[Iterable[Tensor], float], Any] = torch.nn.utils.clip_grad_norm_,
    optimizer: torch.optim.Optimizer | None = None,
) -> Run:
    """AdamW on two micro-batches a step, clipped. `before` runs before each, and is told whether it is the last."""
    optimizer = optimizer or adamw(model)
    losses, norms = [], []
    for step in range(steps):
        for index in range(2):
            before(step, index == 1)
            ids = tokens(2 * step + index)
            part = model(input_ids=ids, labels=ids).loss / 2
            part.backward()
            losses.append(part.item())
        norms.append(whole(clip(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, library_of(model), {"norms": norms, "weights": weights(model)})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained ones, whole. Collective."""
    return {name: whole(param) for name, param in model.named_parameters() if param.requires_grad}
