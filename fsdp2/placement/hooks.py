"""What checkpoints must know of fsdp2's own models and optimizers. Layer: placement.

`fsdp2.checkpoint` saves models that torch alone has sharded, so it imports neither the runtime nor `fsdp2.optim`. When
these are imported, they replace `models` and `optimizers`; the classes here say what holds without them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import version

__all__ = ["COUNTERS", "Memory", "Models", "Optimizers", "registered"]

# State of 0-dim parameters in torch's optimizers that is a counter, although it has the parameter's shape.
COUNTERS = frozenset({"eta", "mu", "mu_product", "step"})


class Memory:
    """Where tensors on the meta device get memory: on the CPU, or on the device of their mesh.

    Attributes:
        home: the device of buffers and of plain parameters.
    """

    home = torch.device("cpu")

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor belongs."""
        return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else self.home

    def parameter_for(self, param: nn.Parameter) -> nn.Parameter | None:
        """An unfilled parameter to replace `param`; None for one of its own."""
        return None

    def writes_to(self, param: nn.Parameter) -> int:
        """The number of writes to `param` while its model was built."""
        return version(param)

    def finish(self) -> None:
        """All parameters are in place."""


class Models:
    """What is known of models."""

    def warn_in_save(self, model: nn.Module) -> None:
        """Called with each module that is saved."""

    def memory_for(self, model: nn.Module, chosen: Iterable[torch.Tensor]) -> Memory:
        """Where these tensors of the model get memory."""
        return Memory()


class Optimizers:
    """What is known of optimizers and their state."""

    def looked_at(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, once no step in the background changes it."""
        return tensor

    def is_in_file(self, tensor: torch.Tensor) -> bool:
        """Whether it is read like plain memory, although its values are in a file."""
        return False

    def is_elsewhere(self, tensor: DTensor) -> bool:
        """Whether it may be on the mesh of another rank alone."""
        return False

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Its kind, if that is not the name of its class."""
        return None

    def classes_of(self, optimizer: torch.optim.Optimizer) -> Sequence[type]:
        """Its class and the base classes, of which each keeps a state of its own."""
        return type(optimizer).__mro__

    def works_on_matrices(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state of a parameter may have shapes of its own."""
        return False

    def new_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, path: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """An unfilled tensor for the state; None if it is cut like its parameter or replicated."""
        return None

    def in_host_memory(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """The parameters whose state the device may have no room for."""
        return set()


class Registered:
    """The two that are in use."""

    def __init__(self) -> None:
        self.models = Models()
        self.optimizers = Optimizers()


registered = Registered()
