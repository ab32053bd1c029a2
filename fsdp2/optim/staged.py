"""Optimizer state that is kept elsewhere than where the optimizer steps: `StagedState`, in host memory. Layer: optim.

The tensors that the optimizer steps with stay the same objects, so what a local optimizer knows about them stays valid;
between steps their memory is freed. The optimizer's state shows DTensors on the stored copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, spec_of
from fsdp2._torch.shared import storage_key
from fsdp2.extras.host_memory import host
from fsdp2.optim.flats import identical

State = dict[Any, Any]


def for_step(value: Any, device: torch.device) -> Any:
    """A value that is not a DTensor, as the step on `device` needs it. (After a load the counter of a fused step is on
    the parameter's device, even if the host steps.)"""
    elsewhere = isinstance(value, torch.Tensor) and value.device != device and device == host()
    return value.to(device) if elsewhere else value


class OffloadedState(ABC):
    """The state of some parameters. All calls but `take` and `prefetch` are made on one stream, which owns the memory
    where the optimizer steps.

    Args:
        state: the inner optimizer's state, by parameter.
        device: where it steps.

    Attributes:
        values: the DTensors that the optimizer steps with, which are stored between steps.
        shown: for each of them, the tensor that the outer optimizer's state shows.
    """

    def __init__(self, state: MutableMapping[Any, State], device: torch.device):
        self.state = state
        self.device = device
        self.values: list[DTensor] = []
        self.shown: list[DTensor] = []

    def take(self, param: Any, outer: State) -> bool:
        """Copy from the outer state of `param` the tensors that are not those that `show` stored there.

        Returns:
            Whether there were any.
        """
        inner = self.state.setdefault(param, {})
        known = {id(shown): value for shown, value in zip(self.shown, self.values, strict=True)}
        copied = False
        for key in [key for key in inner if key not in outer]:
            del inner[key]
        for key, value in outer.items():
            if not isinstance(value, DTensor):
                inner[key] = for_step(value, self.device)
            elif id(value) not in known or known[id(value)] is not inner.get(key):
                inner[key] = make_dtensor(local_tensor(value).to(self.device, copy=True), spec_of(value))
                copied = True
        return copied

    def show(self, param: Any, outer: State) -> None:
        """Put the stored tensors into the outer state."""
        shown = {id(value): shown for value, shown in zip(self.values, self.shown, strict=True)}
        inner = self.state[param]
        for key in [key for key in outer if key not in inner]:
            del outer[key]
        for key, value in inner.items():
            outer[key] = shown.get(id(value), value)

    def all_values(self) -> list[DTensor]:
        """All DTensors in the optimizer's state."""
        return [value for inner in self.state.values() for value in inner.values() if isinstance(value, DTensor)]

    def prefetch(self) -> None:  # noqa: B027
        """Called in the caller's thread just before the step is submitted; `fetch` and `store`, or `drop`, follow."""

    @abstractmethod
    def fetch(self) -> None:
        """Copy the stored values to where the optimizer steps."""

    @abstractmethod
    def store(self) -> None:
        """Store the values again, and free the memory where the optimizer steps."""

    def drop(self) -> None:  # noqa: B027
        """Instead of `store`, after `fetch` or the step have raised."""

    def finish(self) -> None:  # noqa: B027
        """Wait until everything is stored; called in the caller's thread after the step.

        Raises:
            OSError: some could not be stored, and stays in memory.
        """


class StagedState(OffloadedState):
    """State that is kept in host memory.

    Args:
        state, device: as for `OffloadedState`.
        pins: whether the host memory is page-locked.
    """

    def __init__(self, state: MutableMapping[Any, State], device: torch.device, pins: bool):
        super().__init__(state, device)
        self._pins = pins
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes on the device and on the host

    def fetch(self) -> None:
        """Copy it to the device."""
        for there, here in self._places:
            there.untyped_storage().resize_(here.numel())
            there.copy_(here, non_blocking=True)

    def store(self) -> None:
        """Copy it back, and free the memory on the device."""
        values = self.all_values()
        if not identical(values, self.values):
            self._place(values)
        for there, here in self._places:
            here.copy_(there, non_blocking=True)
            there.untyped_storage().resize_(0)  # in stream order

    def _place(self, values: list[DTensor]) -> None:
        """Find a place on the host for these."""
        places = {}
        for key, there in storages_of(values).items():
            places[key] = there, torch.empty(there.numel(), dtype=torch.uint8, device=host(), pin_memory=self._pins)
        self.values, self.shown = values, []
        for value in values:
            local = local_tensor(value)
            _, here = places[storage_key(local)[0]]
            stored = torch.empty(0, dtype=local.dtype, device=here.device)
            stored.set_(here.untyped_storage(), local.storage_offset(), local.shape, local.stride())
            self.shown.append(make_dtensor(stored, spec_of(value)))
        self._places = [*places.values()]


def storages_of(values: Iterable[DTensor]) -> dict[Any, torch.Tensor]:
    """The memory of their local tensors, as bytes, by `storage_key` of the storage."""
    found: dict[Any, torch.Tensor] = {}
    for value in values:
        local = local_tensor(value)
        key, *_ = storage_key(local)
        if key not in found:
            found[key] = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    return found
