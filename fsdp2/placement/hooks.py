"""What checkpoints must know about fsdp2's own models and optimizers. Layer: placement.

`fsdp2.checkpoint` also saves models that are sharded by torch alone, so it imports neither the runtime nor
`fsdp2.optim`. When these are imported, they replace `models` and `optimizers`; the classes here are the defaults.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import version

__all__ = ["COUNTERS", "Memory", "Models", "Optimizers", "registered"]

# State in torch's optimizers that is a counter, although for 0-dim parameters it has the parameter's shape.
COUNTERS = frozenset({"eta", "mu", "mu_product", "step"})


class Memory:
    """Allocates tensors on the meta device: on the CPU, or on the device of their mesh.

    Attributes:
        home: the device of buffers and of plain parameters.
    """

    home = torch.device("cpu")

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """The device of a tensor."""
        return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else self.home

    def parameter_for(self, param: nn.Parameter) -> nn.Parameter | None:
        """An unfilled parameter to replace `param`; None if the caller should allocate it."""
        return None

    def writes_to(self, param: nn.Parameter) -> int:
        """The number of writes to `param` while its model was built."""
        return version(param)

    def finish(self) -> None:
        """Called when all parameters are in place."""


class Models:
    """What is known about models."""

    def warn_in_save(self, model: nn.Module) -> None:
        """Called with each module that is saved."""

    def memory_for(self, model: nn.Module, chosen: Iterable[torch.Tensor]) -> Memory:
        """The allocator for these tensors of the model."""
        return Memory()


class Optimizers:
    """What is known about optimizers and their state."""

    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, after waiting for background steps that change it."""
        return tensor

    def is_in_file(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are in a file, although it is read like plain memory."""
        return False

    def is_elsewhere(self, tensor: DTensor) -> bool:
        """Whether the tensor may be on a mesh of only another rank."""
        return False

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The optimizer's kind, if that is not the name of its class."""
        return None

    def classes_of(self, optimizer: torch.optim.Optimizer) -> Sequence[type]:
        """The classes whose own state the optimizer keeps: its class and base classes."""
        return type(optimizer).__mro__

    def works_on_matrices(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state of a parameter may have other shapes than the parameter."""
        return False

    def new_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, path: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """An unfilled tensor for the state; None if it is sharded like its parameter, or replicated."""
        return None

    def in_host_memory(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """The parameters whose state belongs in host memory, because the device may have no room for it."""
        return set()


class Registered:
    """The `Models` and `Optimizers` in use."""

    def __init__(self) -> None:
        self.models = Models()
        self.optimizers = Optimizers()


registered = Registered()
