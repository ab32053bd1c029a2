"""`StagedState`: an optimizer's state that rests in host memory and is on the device only while it is used. Layer:
optim.

The tensors on the device stay the same objects, so what a local optimizer knows of them stays valid; between steps
their memory is freed. What is shown outside are DTensors on the memory of the host.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, spec_of, storage_key
from fsdp2.optim.run import identical
from fsdp2.policies import host

State = dict[Any, Any]


class StagedState:
    """The state of some parameters. All calls but `take` are made on one stream, which owns the memory on the device.

    Args:
        state: of the optimizer that steps on the device, by parameter.
        device: where it steps.
        pins: whether the host memory is page-locked.
    """

    def __init__(self, state: Mapping[Any, State], device: torch.device, pins: bool):
        self._state = state
        self._device = device
        self._pins = pins
        self._values: list[DTensor] = []  # on the device
        self._shown: list[Any] = []  # for each of them, what is shown outside
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes on the device and on the host

    def take(self, param: Any, outer: State) -> None:
        """What is outside counts: use it for `param`, if it is not what `show` left there."""
        inner = self._state.get(param, {})
        known = {id(shown): value for shown, value in zip(self._shown, self._values, strict=True)}
        for key in [key for key in inner if key not in outer]:
            del inner[key]
        for key, value in outer.items():
            if not isinstance(value, DTensor):
                inner[key] = value
            elif id(value) not in known or known[id(value)] is not inner.get(key):
                inner[key] = make_dtensor(local_tensor(value).to(self._device, copy=True), spec_of(value))

    def fetch(self) -> None:
        """Copy what rests on the host to the device."""
        for there, here in self._places:
            there.untyped_storage().resize_(here.numel())
            there.copy_(here, non_blocking=True)

    def store(self) -> None:
        """Copy it back, and free the memory on the device."""
        values = [value for inner in self._state.values() for value in inner.values() if isinstance(value, DTensor)]
        if not identical(values, self._values):
            self._place(values)
        for there, here in self._places:
            here.copy_(there, non_blocking=True)
            there.untyped_storage().resize_(0)  # in the order of the stream

    def _place(self, values: list[DTensor]) -> None:
        """Find a place on the host for these."""
        places: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._values, self._shown = values, []
        for value in values:
            local = local_tensor(value)
            storage = local.untyped_storage()
            key, *_ = storage_key(local)
            if key not in places:
                there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                nbytes = storage.nbytes()
                places[key] = there, torch.empty(nbytes, dtype=torch.uint8, device=host(), pin_memory=self._pins)
            _, here = places[key]
            rest = torch.empty(0, dtype=local.dtype, device=here.device)
            rest.set_(here.untyped_storage(), local.storage_offset(), local.shape, local.stride())
            shown = make_dtensor(rest, spec_of(value))
            self._shown.append(shown)
        self._places = [*places.values()]

    def show(self, param: Any, outer: State) -> None:
        """Put what rests on the host into the state outside."""
        shown = {id(value): shown for value, shown in zip(self._values, self._shown, strict=True)}
        inner = self._state[param]
        for key in [key for key in outer if key not in inner]:
            del outer[key]
        for key, value in inner.items():
            outer[key] = shown.get(id(value), value)
