"""Private names of torch that several packages need and the core does not. Ground layer."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Placement, Shard, _redistribute
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_fully_shard: Any = torch.distributed.fsdp.fully_shard  # torch's: `fsdp2.compat` may put ours there later


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a fake tensor, with a shape but no values."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def split_factor(placement: Placement) -> int | None:
    """The number of pieces into which other axes have split the dim before this placement splits it: 1 for `Shard`;
    None for other placements. `_StridedShard` is a subclass of `Shard` only in some versions of torch."""
    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return 1 if isinstance(placement, Shard) else None


def shard_dim(placement: Placement) -> int:
    """The dim that a shard placement splits (see `split_factor`)."""
    assert isinstance(placement, (Shard, _StridedShard))
    return placement.dim


def store_of(group: dist.ProcessGroup | None) -> Any:
    """The key-value store of a group's rendezvous; None without process groups. No public function returns it, and
    nothing else can pass a value to another rank without a collective."""
    if not dist.is_initialized():
        return None
    store: Any = distributed_c10d._world.pg_map[group or distributed_c10d._get_default_group()][1]
    return store


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """`tensor.full_tensor()`. In torch 2.13, once a mesh has been flattened, that gathers two shards of one dim in one
    step as if they were even, and misplaces rows if they are not."""
    separately = getattr(_redistribute, "disable_redistribute_transform_optimization", nullcontext)
    with separately():
        return tensor.full_tensor()


def storage_key(tensor: torch.Tensor) -> tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]:
    """Equal for two tensors that are the same memory under two names. `UntypedStorage._cdata` identifies the storage;
    the address would be 0 for every empty shard."""
    storage: int = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name, since operators take strings. torch's functional collectives do the same."""
    module: Any = distributed_c10d  # torch's own type hints have a separate type for the name
    group: dist.ProcessGroup = module._resolve_process_group(name)
    return group


def fully_shard_state(module: nn.Module) -> object:
    """The object that `set_fully_shard_state` has set."""
    state: object = _fully_shard.state(module)
    return state


def set_fully_shard_state(module: nn.Module, state: object) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` return `state`, and list `module` as one that
    `fully_shard` was applied to. This is the only way in which torch's pipelining finds the object that ends a stage's
    backward, and its composable `replicate` the modules to skip. Both read attributes of the module, whose names the
    `contract` decorator's module generates when it is imported."""
    keys = _fully_shard.__globals__
    module.__dict__.setdefault(keys["STATE_KEY"], {})[_fully_shard.__wrapped__] = state
    module.__dict__.setdefault(keys["REGISTRY_KEY"], {})["fully_shard"] = state
