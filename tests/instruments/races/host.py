"""Host memory next to the accelerator that the CPU stands for: ``cpu:0`` next to ``cpu``.

torch does not tell the two apart, so that a parameter that is offloaded to ``cpu:0`` is in the same memory as any other
tensor. Within `host_memory` a tensor that was made on ``cpu:0`` says that it is there, and `to` copies between the two,
as it would between an accelerator and pinned memory. Its memory belongs to the host: operators on it run when they are
called, and only the host's own waiting orders them after what a stream does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp2.extras.host_memory import CPUOffloadPolicy
from tests.instruments.races.detector import HOME, Detector, memory_of

__all__ = ["host_memory"]

DEVICE = torch.device("cpu")
_device_of = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class _TwoMemories(TorchFunctionMode):
    def __init__(self, detector: Detector):
        super().__init__()
        self._detector = detector

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _device_of:
            return HOME if self._is_at_home(args[0]) else func(*args)
        if func is torch.Tensor.to:
            return self._moved(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_at_home(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            return self._detector.belongs_to_host(local)

    def _moved(self, func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if target not in (HOME, DEVICE) or isinstance(tensor, DTensor) or memory_of(tensor) is None:
            return func(tensor, *args, **kwargs)
        if self._is_at_home(tensor) == (torch.device(target) == HOME):
            return func(tensor, *args, **kwargs)
        return torch.empty_like(tensor, device=target).copy_(tensor, non_blocking=kwargs.get("non_blocking", False))


class ToHost(CPUOffloadPolicy):
    """Offload to that memory. Nothing is pinned, as there is nothing to pin it for, but copies are those of pinned
    memory."""

    @property
    def home(self) -> torch.device:
        return HOME


@contextmanager
def host_memory(detector: Detector) -> Iterator[CPUOffloadPolicy]:
    """Tensors say in which memory they are. Yields the policy that offloads to the host's."""
    with _TwoMemories(detector):
        yield ToHost(pin_memory=False)
