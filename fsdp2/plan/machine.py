"""`Machine`: what a plan needs to know of a device, its host and the network. Layer: plan.

Rates are those that programs reach, not those of data sheets: `MACHINES` multiplies data sheets by the shares below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MACHINES", "Machine"]

GB, GIB = 10**9, 2**30

# What large matrix products, elementwise operators and large messages reach of the rates in data sheets: assumptions.
SHARE_OF_FLOPS = 0.7
SHARE_OF_MEMORY = 0.8
SHARE_OF_LINKS = 0.8


@dataclass(frozen=True)
class Machine:
    """One rank's device, and the network.

    Attributes:
        name: what it is called.
        memory: bytes of the device's memory.
        flops: floating-point operations a second, by the name of the dtype; the fastest that dense matrix products
            reach. A dtype that is not there counts as float32.
        memory_bandwidth: bytes a second that operators read and write.
        link: bytes a second that one rank sends within a node, in one direction.
        network: the same between nodes, for each rank.
        host_link: the same between device and host memory.
        host_memory_bandwidth: bytes a second that operators on host memory read and write, for each rank. The default
            is a share of what eight ranks get of sixteen channels of DDR5-4800.
        ranks_per_node: ranks that share a node.
        link_latency, network_latency: seconds for each hop of a ring.
        op_seconds: the least that an operator takes, since the host has to issue it.
        context: bytes that the runtime of the device takes for itself.
        communicator: bytes of each process group's communicator.
        host_memory: bytes of a node's host memory.
        is_accelerator: whether the host runs ahead of the device, and messages have streams (NCCL); else the CPU, gloo.
        source: where the figures are from.
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
    host_memory: int = 0
    is_accelerator: bool = True
    source: str = ""

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second in this dtype."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def message_seconds(self, nbytes: int, ranks: Sequence[int], own: int) -> float:
        """How long a ring of `ranks` takes if each sends `nbytes`, as the rank `own` sees it."""
        size = len(ranks)
        if size == 1:
            return 0.0
        ranks_in_node = sum(rank // self.ranks_per_node == own // self.ranks_per_node for rank in ranks)
        nodes = -(-size // ranks_in_node)
        seconds = nbytes / self.link if ranks_in_node > 1 else 0.0
        seconds += self.link_latency * (min(size, ranks_in_node) - 1)
        if nodes == 1:
            return seconds
        # The rings of a node's ranks cross its border on all of their cards.
        return max(seconds, nbytes / (self.network * ranks_in_node)) + self.network_latency * (nodes - 1)


def _gpu(
    name: str, gib: float, bf16: float, tf32: float, memory: float, link: float, host_link: float, source: str
) -> Machine:
    """From a data sheet: dense rates (some give twice as much, with sparsity), float32 as TF32, links in one direction.
    `gib` is what the driver reports; the network has 400 Gb/s for each GPU."""
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
        source=source,
    )


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu("h100", 79.1, 989e12, 494e12, 3.35e12, 450 * GB, 64 * GB, f"H100 SXM: {_NVIDIA}h100/"),
        _gpu("h200", 139.8, 989e12, 494e12, 4.8e12, 450 * GB, 64 * GB, f"H200 SXM: {_NVIDIA}h200/"),
        _gpu("a100", 79.1, 312e12, 156e12, 2.039e12, 300 * GB, 32 * GB, f"A100 80GB SXM: {_NVIDIA}a100/"),
        # Appendix A: dense, FP32 accumulation; peers over PCIe 4.0 x16.
        _gpu("rtx4090", 23.6, 165e12, 82.6e12, 1.008e12, 32 * GB, 32 * GB, f"Ada GPU architecture: {_ADA}"),
    )
}
