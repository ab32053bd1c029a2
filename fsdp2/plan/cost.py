"""What one operator takes: a roofline of its floating-point operations and its bytes. Layer: plan.

FLOPs come from torch's registry of formulas (`torch.utils.flop_counter`), which covers matrix products, convolutions
and fused attention. Any other operator is as fast as memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp2.plan.machine import Machine

__all__ = ["nbytes_of", "seconds_of"]

# On the CPU attention has operators of its own, which the registry lacks: the formula, the positions of the shapes that
# it needs, and that of `is_causal`. Fused kernels leave out the half that causal attention masks.
_CPU_ATTENTION: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, (0, 1, 2), 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, (0, 1, 2, 3), 7),
}
# These say where memory is, and neither read nor write it.
_TOUCHES_NOTHING = ("empty", "new_empty", "set_", "resize_", "record_stream")


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def seconds_of(
    machine: Machine, function: Any, args: Sequence[Any], kwargs: Any, result: Any, tensors: Sequence[torch.Tensor]
) -> float:
    """How long the device takes for one call, which reads and writes `tensors`."""
    if function.__name__.startswith(_TOUCHES_NOTHING):
        return 0.0
    seconds = nbytes_of(tensors) / machine.memory_bandwidth
    flops = _flops_of(function, args, kwargs, result)
    if flops:
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        seconds = max(seconds, flops / machine.flops_of(dtype))
    return seconds


def _flops_of(function: Any, args: Sequence[Any], kwargs: Any, result: Any) -> float:
    packet = getattr(function, "overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    attention = _CPU_ATTENTION.get(getattr(packet, "__name__", ""))
    if attention is None:
        return 0.0
    formula, positions, causal = attention
    is_causal = len(args) > causal and bool(args[causal])
    return float(formula(*(args[position].shape for position in positions))) / (2 if is_causal else 1)
