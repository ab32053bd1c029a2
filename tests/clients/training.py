"""A tiny Llama, a loop that trains it as a client's trainer would, and what several clients need to run here."""

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.clients import Run, library_of

VOCAB, LENGTH, LAYERS = 64, 8, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def without(*names: str) -> None:
    """Packages that a client imports and these tests do not need: modules that have anything and do nothing."""
    for name in names:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])


def take_cpus_for_accelerators() -> dict[str, Any]:
    """Accelerate ignores its FSDP plugin and refuses tensor parallelism on CPUs, but for this field of its state.

    Returns what `TrainingArguments` needs in addition.
    """
    if torch.cuda.is_available():
        return {}
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM, **changes: Any) -> Any:
    """Three layers, the same on every rank."""
    torch.manual_seed(5)
    return kind(LlamaConfig(**(SIZES | {"tie_word_embeddings": False} | changes)))


def tokens(seed: int, num: int = 2, rank: int | None = None) -> Tensor:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if rank is None else rank))
    return torch.randint(VOCAB, (num, LENGTH), generator=generator)


def whole(tensor: Any) -> Any:
    """All of it. Collective."""
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_state(model: nn.Module) -> dict[str, Any]:
    """All parameters and buffers, whole. Collective."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, **options)


def train(
    model: nn.Module,
    *,
    steps: range = range(20),
    before: Callable[[int, bool], Any] = lambda step, is_last: None,
    clip: Callable[[Iterable[Tensor], float], Any] = torch.nn.utils.clip_grad_norm_,
    optimizer: torch.optim.Optimizer | None = None,
    data_rank: int | None = None,
) -> Run:
    """AdamW on two micro-batches a step, clipped. `before` runs before each, and is told whether it is the last."""
    optimizer = optimizer or adamw(model)
    losses, norms = [], []
    for step in steps:
        for index in range(2):
            before(step, index == 1)
            ids = tokens(2 * step + index, rank=data_rank)
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
