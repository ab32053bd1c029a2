"""Local tensors that are more than plain memory. Layer: runtime, below the parameter."""

from typing import Any

import torch
from torch import nn

from fsdp2.runtime import hooks


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a local tensor is of a subclass, whose memory only its own operators may access."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def extension_of(fqn: str, local: torch.Tensor) -> Any:
    """What changes the all-gather of `local`, if anything does. Raises `MisuseError` if it cannot be used."""
    return next((found for find in hooks.gather_hooks if (found := find(fqn, local)) is not None), None)
