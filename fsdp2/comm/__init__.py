"""How a unit's operands are communicated: the `Comm` interface and its implementations. Layer: comm."""

import torch
import torch.distributed as dist

from fsdp2.comm.base import Comm
from fsdp2.comm.flat import FlatComm, NcclComm
from fsdp2.comm.gloo import GlooComm

__all__ = ["COMMS", "comm_for"]

# By the name of the backend. A third-party backend may be added.
COMMS: dict[str, Comm] = {"gloo": GlooComm(), "nccl": NcclComm()}
_FLAT = FlatComm()


def comm_for(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The implementation for `device`'s backend in `group`; `FlatComm` for other backends."""
    for part in dist.get_backend_config(group).split(","):
        device_type, _, backend = part.rpartition(":")
        if device_type in ("", device.type):
            # gloo's point-to-point needs host memory; its collectives also accept CUDA tensors. The wrapper that torch
            # puts around a group for TORCH_DISTRIBUTED_DEBUG=DETAIL has no coalesced collectives in 2.11 (2.13 has).
            level = dist.get_debug_level().name  # type: ignore[attr-defined]
            is_plain = device.type == "cpu" if backend == "gloo" else level != "DETAIL"
            return COMMS.get(backend, _FLAT) if is_plain else _FLAT
    return _FLAT
