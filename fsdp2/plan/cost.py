"""What one operator costs: what was measured of it, or its floating-point operations and bytes. Layer: plan.

FLOPs come from torch's registry of formulas (`torch.utils.flop_counter`), which covers matrix products, convolutions
and fused attention. Any other operator is as fast as memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp2.plan.machine import Machine

__all__ = ["Call", "Cost", "Like"]

# On the CPU attention has operators of its own, which the registry lacks: the formula, the positions of the shapes that
# it needs, and that of `is_causal`. Fused kernels leave out the half that causal attention masks.
_CPU_ATTENTION: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, (0, 1, 2), 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, (0, 1, 2, 3), 7),
}
# These say where memory is, and neither read nor write it.
_TOUCHES_NOTHING = ("empty", "new_empty", "set_", "resize_", "record_stream")
_PLAIN = (torch.Tensor, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MANY = 12  # tensors in a name; of longer lists it has their number and bytes


@dataclass(frozen=True)
class Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of an operator of aten: ``addmm.default``, and its arguments, with a `Like` for each tensor."""

    operator: str
    args: Any
    kwargs: Any


class Cost:
    """How long operators take on a machine.

    Attributes:
        seen: one call of each kind that was asked for, by its name: ``addmm.default float32[512] float32[64,128]``.
            Calls of a kind take equally long.
    """

    def __init__(self, machine: Machine) -> None:
        self.seen: dict[str, Call] = {}
        self._machine = machine
        self._seconds: dict[str, float] = {}

    def seconds_of(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tensors: Sequence[torch.Tensor]
    ) -> float:
        """How long the device takes for one call: what was measured, or else whichever is slower of its arithmetic and
        its memory.

        Args:
            tensors: all that the call reads and writes.
        """
        name = _name_of(function.__name__, args, tensors)
        seconds = self._seconds.get(name)
        if seconds is None:
            if function.namespace == "aten" and _is_plain((args, kwargs)):
                self.seen[name] = Call(function.__name__, _like(args), _like(kwargs))
            seconds = self._machine.operators.get(name)
            if seconds is None:
                seconds = self._estimate(function, args, kwargs, result, tensors)
            self._seconds[name] = seconds
        return seconds

    def on_host(self, tensors: Sequence[torch.Tensor]) -> float:
        """How long the host takes for a call on these tensors in its memory, all that is read and written."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return nbytes / self._machine.host_memory_bandwidth

    def _estimate(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tensors: Sequence[torch.Tensor]
    ) -> float:
        if function.__name__.startswith(_TOUCHES_NOTHING):
            return 0.0
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        seconds = nbytes / self._machine.memory_bandwidth
        flops = _flops_of(function, args, kwargs, result)
        if flops:
            dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
            seconds = max(seconds, flops / self._machine.flops_of(dtype))
        return seconds


def _name_of(operator: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
    flags = [str(arg) for arg in args if isinstance(arg, bool)]
    if len(tensors) > _MANY:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return " ".join([operator, f"{len(tensors)} of {nbytes} bytes", *flags])
    texts = [f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for tensor in tensors]
    return " ".join([operator, *texts, *flags])


def _is_plain(tree: Any) -> bool:
    """Whether there are only tensors and values: no storages, groups or generators."""
    if isinstance(tree, (list, tuple)):
        return all(_is_plain(each) for each in tree)
    if isinstance(tree, dict):
        return _is_plain(list(tree.values()))
    return tree is None or isinstance(tree, _PLAIN)


def _like(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return Like(tuple(tree.shape), tree.stride(), tree.dtype)
    if isinstance(tree, (list, tuple)):
        return tuple(_like(each) for each in tree)
    if isinstance(tree, dict):
        return {key: _like(each) for key, each in tree.items()}
    return tree


def _flops_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    packet = getattr(function, "overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    attention = _CPU_ATTENTION.get(getattr(packet, "__name__", ""))
    if attention is None:
        return 0.0
    formula, positions, causal = attention
    is_causal = len(args) > causal and bool(args[causal])
    return float(formula(*(args[position].shape for position in positions))) / (2 if is_causal else 1)
