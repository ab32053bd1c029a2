"""`Machine`: what a plan needs to know of a device, its host and the network. Layer: plan.

Rates are those that programs reach, not those of data sheets: `MACHINES` multiplies data sheets by the shares below.
"""

from collections.abc import Mapping
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
        op_seconds: what the host takes to issue an operator.
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

    def message_seconds(self, nbytes: int, size: int, ranks_in_node: int) -> float:
        """How long a ring of `size` ranks, of which `ranks_in_node` share a node, takes if each sends `nbytes`."""
        if size == 1:
            return 0.0
        nodes = -(-size // ranks_in_node)
        seconds = nbytes / self.link if ranks_in_node > 1 else 0.0
        seconds += self.link_latency * (min(size, ranks_in_node) - 1)
        if nodes == 1:
            return seconds
        # The rings of a node's ranks cross its border on all of their cards.
        return max(seconds, nbytes / (self.network * ranks_in_node)) + self.network_latency * (nodes - 1)


def _gpu(
    name: str, gib: float, flops: Mapping[str, float], memory: float, link: float, host_link: float, source: str
) -> Machine:
    return Machine(
        name,
        int(gib * GIB),
        {dtype: SHARE_OF_FLOPS * rate for dtype, rate in flops.items()},
        SHARE_OF_MEMORY * memory,
        SHARE_OF_LINKS * link,
        SHARE_OF_LINKS * 50 * GB,  # 400 Gb/s a GPU
        SHARE_OF_LINKS * host_link,
        context=GIB // 2,
        communicator=GIB // 4,
        source=source,
    )


def _rates(bf16: float, tf32: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float16": bf16, "float32": tf32}


# Dense rates (data sheets give twice as much, with sparsity), float32 as TF32, links in one direction. `gib` is what
# the driver reports.
_HOPPER = _rates(989e12, 494e12)
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            *("h100", 79.1, _HOPPER, 3.35e12, 450 * GB, 64 * GB),
            "H100 SXM: https://www.nvidia.com/en-us/data-center/h100/",
        ),
        _gpu(
            *("h200", 139.8, _HOPPER, 4.8e12, 450 * GB, 64 * GB),
            "H200 SXM: https://www.nvidia.com/en-us/data-center/h200/",
        ),
        _gpu(
            *("a100", 79.1, _rates(312e12, 156e12), 2.039e12, 300 * GB, 32 * GB),
            "A100 80GB SXM: https://www.nvidia.com/en-us/data-center/a100/",
        ),
        _gpu(
            *("rtx4090", 23.6, _rates(165e12, 82.6e12), 1.008e12, 32 * GB, 32 * GB),
            "NVIDIA Ada GPU architecture, appendix A (dense, FP32 accumulation; peers over PCIe 4.0 x16): "
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
    )
}
