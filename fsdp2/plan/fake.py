"""Models of fake tensors, which take no memory. Layer: plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2._torch import parameter_slots
from fsdp2._torch.plan import buffer_slots
from fsdp2.errors import UnsupportedError

__all__ = ["build_on_meta", "make_fake"]


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model, on the meta device unless its builder chooses another."""
    try:
        with torch.device("meta"):
            model = build()
    except NotImplementedError as error:
        raise UnsupportedError(
            f"plan: the model is built on the meta device, where its builder fails: {error}. Leave out "
            ".to(device) and everything that reads values"
        ) from error
    return model


def make_fake(model: nn.Module) -> Callable[[], None]:
    """Replace the tensors of a model (real, or on the meta device) by fake CPU tensors. Returns a function that
    restores them."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
                new.__dict__.update(tensor.__dict__)
            made[tensor] = new
        return made[tensor]

    for module in model.modules():
        slots: tuple[dict[str, Any], ...] = (parameter_slots(module), buffer_slots(module), module.__dict__)
        for each in slots:
            for name, value in each.items():
                if isinstance(value, torch.Tensor):
                    before.append((each, name, value))
                    each[name] = fake(value)

    def put_back() -> None:
        for slot, name, tensor in before:
            slot[name] = tensor

    return put_back
