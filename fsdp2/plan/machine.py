"""`Machine`: what a plan needs to know about a device, its host and the network; and the time of one operator there, by
a roofline of its floating-point operations and its bytes. Layer: plan.

Rates are those that programs reach, not those of data sheets: `MACHINES` multiplies data sheets by the shares below.
FLOPs come from torch's registry of formulas (`torch.utils.flop_counter`), which covers matrix products, convolutions
and fused attention. All other operators are limited by memory bandwidth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["MACHINES", "Machine", "count_flops", "nbytes_of", "seconds_of"]

GB, GIB = 10**9, 2**30

# The assumed shares of data-sheet rates that large matrix products, elementwise operators and large messages reach.
SHARE_OF_FLOPS = 0.7
SHARE_OF_MEMORY = 0.8
SHARE_OF_LINKS = 0.8

# The registry lacks the CPU's attention operators: the formula, the positions of the shapes that it needs, and that of
# `is_causal`. Fused kernels skip the half that causal attention masks.
_CPU_ATTENTION: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, (0, 1, 2), 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, (0, 1, 2, 3), 7),
}
# Operators that neither read nor write memory.
_TOUCHES_NOTHING = ("empty", "new_empty", "set_", "resize_", "record_stream")


@dataclass(frozen=True)
class Machine:
    """One rank's device, and the network.

    Attributes:
        name: its name.
        memory: bytes of the device's memory.
        flops: floating-point operations per second that dense matrix products reach at most, by the name of the dtype.
            A missing dtype counts as float32.
        memory_bandwidth: bytes per second that operators read and write.
        link: bytes per second that one rank sends within a node, in one direction.
        network: the same between nodes, per rank.
        host_link: the same between device and host memory.
        host_memory_bandwidth: bytes per second that operators on host memory read and write, per rank. The default is a
            share of what each of eight ranks gets from sixteen channels of DDR5-4800.
        ranks_per_node: ranks that share a node.
        link_latency, network_latency: seconds per hop of a ring.
        op_seconds: the least time of an operator, since the host has to issue it.
        context: bytes that the device's runtime uses itself.
        communicator: bytes of each process group's communicator.
        is_accelerator: True if the host runs ahead of the device, and messages have streams (NCCL); False for the CPU
            with gloo.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: float
    network: float
    host_link: float = 20 * GB
    host_memory_bandwidth: float = 60 * GB
    ranks_per_node: int = 8
    link_latency: float = 3e-6
    network_latency: float = 10e-6
    op_seconds: float = 8e-6
    context: int = 0
    communicator: int = 0
    is_accelerator: bool = True

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second in this dtype."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def message_seconds(self, nbytes: int, ranks: Sequence[int], own: int) -> float:
        """The time of a ring of `ranks` in which each sends `nbytes`, from the view of rank `own`."""
        size = len(ranks)
        if size == 1:
            return 0.0
        ranks_in_node = sum(rank // self.ranks_per_node == own // self.ranks_per_node for rank in ranks)
        nodes = -(-size // ranks_in_node)
        seconds = nbytes / self.link if ranks_in_node > 1 else 0.0
        seconds += self.link_latency * (min(size, ranks_in_node) - 1)
        if nodes == 1:
            return seconds
        # The rings of a node's ranks use all of their network cards.
        return max(seconds, nbytes / (self.network * ranks_in_node)) + self.network_latency * (nodes - 1)


def _gpu(name: str, gib: float, bf16: float, tf32: float, memory: float, link: float, host_link: float) -> Machine:
    """A machine from a data sheet: dense rates (some sheets give twice as much, with sparsity), float32 as TF32, links
    in one direction. `gib` is what the driver reports; the network has 400 Gb/s per GPU."""
    flops = {"bfloat16": bf16, "float16": bf16, "float32": tf32}
    return Machine(
        name,
        int(gib * GIB),
        {dtype: SHARE_OF_FLOPS * rate for dtype, rate in flops.items()},
        SHARE_OF_MEMORY * memory,
        SHARE_OF_LINKS * link,
        SHARE_OF_LINKS * 50 * GB,
        SHARE_OF_LINKS * host_link,
        context=GIB // 2,
        communicator=GIB // 4,
    )


# Sources: https://www.nvidia.com/en-us/data-center/h100/, h200/ and a100/ (SXM, 80 GB); of the rtx4090 (dense, FP32
# accumulation; peers over PCIe 4.0 x16) appendix A of
# https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu("h100", 79.1, 989e12, 494e12, 3.35e12, 450 * GB, 64 * GB),
        _gpu("h200", 139.8, 989e12, 494e12, 4.8e12, 450 * GB, 64 * GB),
        _gpu("a100", 79.1, 312e12, 156e12, 2.039e12, 300 * GB, 32 * GB),
        _gpu("rtx4090", 23.6, 165e12, 82.6e12, 1.008e12, 32 * GB, 32 * GB),
    )
}


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def seconds_of(
    machine: Machine, function: Any, args: Sequence[Any], kwargs: Any, result: Any, tensors: Sequence[torch.Tensor]
) -> float:
    """The device's time for one call, which reads and writes `tensors`."""
    if function.__name__.startswith(_TOUCHES_NOTHING):
        return 0.0
    seconds = nbytes_of(tensors) / machine.memory_bandwidth
    flops = count_flops(function, args, kwargs, result)
    if flops:
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        seconds = max(seconds, flops / machine.flops_of(dtype))
    return seconds


def count_flops(function: Any, args: Sequence[Any], kwargs: Any, result: Any) -> float:
    """Floating-point operations of one call; 0 if no formula is known."""
    packet = getattr(function, "overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    attention = _CPU_ATTENTION.get(getattr(packet, "__name__", ""))
    if attention is None:
        return 0.0
    formula, positions, causal = attention
    is_causal = len(args) > causal and bool(args[causal])
    return float(formula(*(args[position].shape for position in positions))) / (2 if is_causal else 1)
