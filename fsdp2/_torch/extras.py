"""Private names of torch for `fsdp2.extras`. Ground layer."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from fsdp2._torch import GATHER_OPTIONS, Op, collective_of, scatter_options


def group_allocates(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend can allocate memory on `device`. Only a private method of the group returns the
    backend."""
    try:
        return bool(group._get_backend(device).supports_tensor_alloc(device))
    except RuntimeError:  # no backend for this kind of device
        return False


def allocate_from_group(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1-D memory of the group's backend, which it registered with the network. Only where `group_allocates`."""
    tensor: torch.Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


def use_symmetric_memory(backend: str) -> None:
    """Choose where symmetric memory comes from, for this process; there is no public module for symmetric memory."""
    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """1-D memory that every rank of `group` has mapped; collective. It comes from the pool of symmetric memory, which
    reuses freed memory that is already registered; `symmetric_memory.empty` would register it again."""
    pool: Any = symmetric_memory.get_mem_pool(device)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(numel, dtype=dtype, device=device)
    symmetric_memory.rendezvous(tensor, group.group_name)
    return tensor


def all_gather_flat(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The flat all-gather, asynchronous."""
    if output.is_complex():
        output, source = torch.view_as_real(output), torch.view_as_real(source)
    return collective_of(group, "all_gather_single")(output, source, GATHER_OPTIONS)


def reduce_scatter_flat(output: torch.Tensor, source: torch.Tensor, op: Op, group: dist.ProcessGroup) -> dist.Work:
    """The flat reduce-scatter, asynchronous."""
    return collective_of(group, "reduce_scatter_single")(output, source, scatter_options(op))
