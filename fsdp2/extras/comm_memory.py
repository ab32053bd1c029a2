"""Communication buffers from the process group's own memory, or in symmetric memory: two setters. Layer: extras.

With both a backend can be faster than with ordinary memory (NCCL: zero-copy over NVLink SHARP and InfiniBand;
copy-engine all-gathers). They are kinds of *memory* for the backend's own flat collectives::

    memory = GroupMemory(group, device)
    comm = CustomComm(base, FlatAllGather(memory), FlatReduceScatter(memory))

Only the errors have been tested on a GPU. The group's own memory needs a device with multicast, and symmetric memory
needs ranks that can map each other's memory; the tests' ranks share one GPU and have neither.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from warnings import warn

import torch
import torch.distributed as dist

from fsdp2._torch.extras import (
    all_gather_flat,
    allocate_from_group,
    group_allocates,
    reduce_scatter_flat,
    symmetric_empty,
    use_symmetric_memory,
)
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.extras.custom_comm import AllGather, ReduceScatter, customise, customised_by_user
from fsdp2.runtime import hooks
from fsdp2.runtime.unit import unit_for
from fsdp2.settings import groups_of


class Memory(Protocol):
    """Allocates uninitialised 1-D buffers. Every rank of the group must request the same ones in the same order."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class GroupMemory:
    """Memory that `group`'s backend allocated (``set_allocate_memory_from_process_group_for_comm``).

    Raises:
        UnsupportedError: the backend has no such memory on `device`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        if not group_allocates(group, device):
            raise UnsupportedError(
                f"memory from the process group: the backend of {device.type} tensors in this group has no such memory "
                f"({dist.get_backend_config(group)}); NCCL has, on devices with multicast (NVLink SHARP). Leave this "
                "setting off here."
            )
        self.group = group

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate_from_group(self.group, numel, dtype, device)


class SymmetricMemory:
    """Memory that all ranks of `group` have mapped (``set_symm_mem_for_comm``). Creating one is collective.

    Raises:
        ArgumentError: `backend` is not ``"NCCL"``.
        UnsupportedError: `device` is not a CUDA device, its backend in `group` is not NCCL, torch has no NCCL symmetric
            memory, or the ranks cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, backend: str = "NCCL"):
        if backend != "NCCL":
            raise ArgumentError(f"symmetric memory: expected backend 'NCCL', got {backend!r}")
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        if backends.get(device.type) != "nccl":
            raise UnsupportedError(
                f"symmetric memory: expected CUDA parameters and a process group of NCCL, got {device.type} and "
                f"{dist.get_backend_config(group)}. Leave this setting off here."
            )
        try:
            use_symmetric_memory(backend)
        except RuntimeError as error:
            raise UnsupportedError(f"symmetric memory: this build of torch has none of {backend}: {error}") from error
        dist.barrier(group)  # NCCL connects at the first collective, and a rendezvous needs the connection
        self.group = group
        try:
            self.empty(1, torch.float32, device)
        except RuntimeError as error:
            raise UnsupportedError(
                f"symmetric memory: the ranks of this group cannot have it: {error}. All of them must be able to map "
                "each other's memory (NVLink). Leave this setting off here."
            ) from error

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return symmetric_empty(numel, dtype, device, self.group)


class InMemory:
    """Allocates its buffers from `memory`."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.memory.empty(size[0], dtype, device)


class FlatAllGather(InMemory, AllGather):
    """The backend's own flat all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Always returns a handle."""
        return all_gather_flat(output_tensor, input_tensor, group)


class FlatReduceScatter(InMemory, ReduceScatter):
    """The backend's own flat reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Always returns a handle."""
        return reduce_scatter_flat(output_tensor, input_tensor, op, group)


def set_group_memory(module: object, enable: bool) -> None:
    """`FSDPModule.set_allocate_memory_from_process_group_for_comm`."""
    call = "set_allocate_memory_from_process_group_for_comm"
    try:
        _use_memory(module, call, GroupMemory if enable else None)
    except UnsupportedError as error:
        warn(f"{call}: no effect: {error}", stacklevel=3)


def set_symmetric_memory(module: object, backend: str) -> None:
    """`FSDPModule.set_symm_mem_for_comm`."""
    if unit_for(module).settings.max_input_buffers > 1:
        raise ArgumentError("set_symm_mem_for_comm: set_reduce_scatter_max_input_buffers must be 1 with it")
    _use_memory(module, "set_symm_mem_for_comm", lambda group, device: SymmetricMemory(group, device, backend))


hooks.setters["set_allocate_memory_from_process_group_for_comm"] = set_group_memory
hooks.setters["set_symm_mem_for_comm"] = set_symmetric_memory


def _use_memory(module: object, call: str, make: Callable[..., Memory] | None) -> None:
    for group in groups_of(module):
        if make is not None and customised_by_user(group):
            raise MisuseError(f"{call}: this unit has custom collectives, which allocate their own memory")
        shard_group = group.roles.shard_group
        if make is None or shard_group is None:
            customise(group, in_memory=(None, None))
        else:
            memory = make(shard_group, group.roles.device)
            # With a `reduce_scatter_dtype` gradients go through `NarrowComm` instead.
            is_flat = unit_for(module).policy.reduce_scatter_dtype is None
            customise(group, in_memory=(FlatAllGather(memory), FlatReduceScatter(memory) if is_flat else None))
