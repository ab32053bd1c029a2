"""`Slot`: one place where a module holds a parameter. Layer: runtime."""

from weakref import ref

import torch
from torch import nn

from fsdp2._torch import allows_direct_slots, parameter_slots

__all__ = ["Slot"]


class Slot:
    """One place where a module holds a parameter. Holds the module weakly: modules own units, not the reverse."""

    def __init__(self, module: nn.Module, name: str):
        self.name = name
        self._module = ref(module)
        self._direct = allows_direct_slots(module)

    def get(self) -> torch.Tensor | None:
        """What the module holds now."""
        module = self._module()
        return None if module is None else parameter_slots(module)[self.name]

    def put(self, param: nn.Parameter) -> None:
        """Make the module hold `param`."""
        module = self._module()
        if module is None:
            return
        if self._direct:
            parameter_slots(module)[self.name] = param
        else:
            setattr(module, self.name, param)

    @property
    def direct(self) -> dict[str, nn.Parameter | None] | None:
        """Where to write without a call; None where `put` must be used."""
        module = self._module()
        return parameter_slots(module) if self._direct and module is not None else None

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return self._module()
