"""Private names of torch for `fsdp2.extras`. Ground layer."""

import hashlib
import threading
from collections import Counter
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d

from fsdp2._torch import GATHER_OPTIONS, collective_of, scatter_options

Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def group_allocates(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend can allocate memory on `device`. Only a private method of the group returns the
    backend."""
    try:
        return bool(group._get_backend(device).supports_tensor_alloc(device))
    except RuntimeError:  # no backend for this device type
        return False


def allocate_from_group(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1-D memory of the group's backend, which has registered it with the network. Requires `group_allocates`."""
    tensor: torch.Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


def use_symmetric_memory(backend: str) -> None:
    """Choose the backend of symmetric memory for this process; symmetric memory has no public module."""
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


_own = threading.local()  # `name`: the name of the group that this thread is making
_name_of_torch = distributed_c10d._hash_ranks_to_str
distributed_c10d._hash_ranks_to_str = lambda ranks: getattr(_own, "name", "") or _name_of_torch(ranks)
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def new_group_of(ranks: list[int], backend: str, name: str) -> dist.ProcessGroup:
    """A new group, made by its own ranks only, which must all have made equally many groups of these ranks before.

    torch names such a group after its ranks and the number of all groups of the process, in which ranks may differ;
    ranks with different names would wait for each other forever. And if the default group is bound to a device, torch
    would split its communicator, which needs all its ranks (https://github.com/pytorch/pytorch/pull/129965).
    """
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    bound, world.bound_device_id = world.bound_device_id, None
    _own.name = hashlib.sha256(f"fsdp2 {ranks} {made[tuple(ranks)]}".encode()).hexdigest()
    try:
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc=name)
        return cast(dist.ProcessGroup, group)
    finally:
        world.bound_device_id, _own.name = bound, ""
