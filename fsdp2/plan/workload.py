"""`Workload`: the model, batch, loss and optimizer to plan. Layer: plan."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.errors import ArgumentError

__all__ = ["Workload", "default_loss"]


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call `model` with the batch (a dict: as keywords; a tuple: as arguments). The loss is the output's ``.loss``, or
    the mean of a tensor."""
    positional, keywords = ((), batch) if isinstance(batch, dict) else (batch, {})
    output = model(*(positional if isinstance(positional, tuple) else (positional,)), **keywords)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor):
        raise ArgumentError(
            f"plan: the model returned a {type(output).__name__}; pass loss=, a function of model and batch"
        )
    return loss if not loss.dim() else loss.float().mean()


@dataclass(frozen=True)
class Workload:
    """What one rank does in a step.

    `build`, `batch` and `loss` run under fake tensors: nothing is allocated and nothing is computed, whatever the size.

    Attributes:
        build: makes the model, on any device, including the meta device.
        batch: makes one microbatch of one rank, with a given number of sequences or images: a tensor, or tensors in a
            dict or tuple.
        batch_size: the number of sequences or images in a microbatch.
        loss: the loss of the model on such a batch.
        optimizer: makes the optimizer of the trainable parameters.
        microbatches: forwards and backwards before each optimizer step; gradients are reduced in the last.

    Example::

        def batch(size):
            ids = torch.zeros(size, 4096, dtype=torch.long)
            return {"input_ids": ids, "labels": ids}

        workload = Workload(lambda: LlamaForCausalLM(config), batch, batch_size=2)
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor] = default_loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    batch_size: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}: expected a number, 1 or more; got {value!r}")
