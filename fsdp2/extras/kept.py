"""Values that a group keeps when it reshards, so that it need not gather them again. Layer: extras.

=====================  =============================================================================================
`SameAddress`          the memory, not its values: `set_keep_unsharded_storage`
`Frozen`, `OnHost`     of frozen parameters, on the device or as a copy in host memory: `ZeroPolicy(keep_frozen=...)`
`kept_for_evaluation`  of a root between two forwards without gradients, if the shards of all ranks still have them
=====================  =============================================================================================
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.shared import is_fake
from fsdp2.comm.base import PlannedReduction, What, wrapped
from fsdp2.extras.host_memory import host
from fsdp2.extras.in_place import own_rows
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Around
from fsdp2.runtime.storage import ReleasedMemory


class SameAddress(Around):
    """Keeps the memory. The next gather writes to it while compute may still read it, so it waits for compute."""

    follows_compute = True

    def release(self, group: Bucket, memory: ReleasedMemory) -> None:
        pass


class Frozen(Around):
    """Keeps memory and values while no parameter of the group requires a gradient."""

    def release(self, group: Bucket, memory: ReleasedMemory) -> None:
        if any(group.gradients.trainable):
            self.inner.release(group, memory)
        else:
            versions = group.seen.versions
            self.kept = lambda: versions == group.seen.now()


class OnHost(Around):
    """Copies the whole values to host memory at the first reshard, and from there in place of later gathers, both on
    the all-gather stream, which alone touches the memory: so neither the host nor compute waits for it."""

    copy: "HostCopy | None" = None

    def start(self, group: Bucket) -> Callable[[], None]:
        if self.copy is not None and self.copy.versions == group.seen.now() and _is_frozen(group):
            self.base.alloc()
            return partial(self.copy.copy_to, group.params)
        self.copy = None
        return self.inner.start(group)

    def release(self, group: Bucket, memory: ReleasedMemory) -> None:
        if self.copy is None and _is_frozen(group):
            with torch.no_grad(), memory.streams.gathering():
                self.copy = HostCopy(group.params, group.seen.versions)
        self.inner.release(group, memory)

    def forget(self) -> None:
        self.copy = None


def _is_frozen(group: Bucket) -> bool:
    return not any(param.sharded.requires_grad for param in group.params)


class HostCopy:
    """The whole values of `params`, which are gathered and plain, in the compute dtype; page-locked beside an
    accelerator. `versions` are those of the sharded parameters that were gathered."""

    def __init__(self, params: Sequence[ManagedParameter], versions: list[int]):
        self.versions = versions
        with torch.inference_mode(False), torch.no_grad():
            self._flats = []
            for whole in _wholes(params):
                pins = whole.device.type != "cpu"
                flat = torch.empty(whole.numel(), dtype=whole.dtype, device=host(), pin_memory=pins)
                self._flats.append(flat.copy_(whole, non_blocking=True))

    @property
    def nbytes(self) -> int:
        """How much host memory it takes."""
        return sum(flat.nbytes for flat in self._flats)

    def copy_to(self, params: Sequence[ManagedParameter]) -> None:
        """Fill the unsharded parameters, whose memory is allocated."""
        for whole, flat in zip(_wholes(params), self._flats, strict=True):
            whole.copy_(flat, non_blocking=True)


def _wholes(params: Sequence[ManagedParameter]) -> list[torch.Tensor]:
    wholes = [param.whole for param in params]
    return [whole.view(-1) for whole in wholes if whole is not None]


def kept_for_evaluation(group: Bucket) -> Callable[[], bool] | None:
    """What tells whether the values are current, for a group whose values can be compared with the shards, and whose
    gather communicates at all."""
    roles, is_plain = group.roles, not any(param.is_extended for param in group.params)
    if roles.shard_group is None or roles.sharded_replicas or not is_plain or group.keep == "host":
        return None
    if group.keep is True and not any(group.gradients.trainable):
        return None  # `Frozen` keeps them
    return partial(_agrees, group, group.seen.versions)


def _maximum(flag: torch.Tensor, what: What) -> None:
    """That of all ranks, at once, and without events."""

    def start(sources: Sequence[torch.Tensor], _: object) -> Any:
        return dist.all_reduce(sources[0], dist.ReduceOp.MAX, what.group, async_op=True)

    collective = wrapped(PlannedReduction(start, 1), what)
    collective.wait(collective.start([flag], [flag]))


def _agrees(group: Bucket, versions: list[int]) -> bool:
    """Whether the shards of all ranks have the values that were gathered and kept. Collective over the shard group: one
    number. The host waits for it, since what is gathered next depends on it. Within a step nobody asks: a shard has no
    counter that counts all changes (`tensor.data`, and operators on lists of tensors, leave that of a DTensor as it
    was), so values are compared."""
    if torch.is_grad_enabled():
        return False
    group.settle()
    is_same, shard_group = versions == group.seen.now(), group.roles.shard_group
    assert shard_group is not None
    if is_fake(group.params[0].flat):
        return is_same
    differ = not (is_same and all(map(_has_shard, group.params)))
    flag = torch.tensor([differ], dtype=torch.int32, device=group.roles.device)
    _maximum(flag, group.channel.what("comparison of kept values", shard_group))
    return not flag.item()


def _has_shard(param: ManagedParameter) -> bool:
    rows, shard = own_rows(param)
    return torch.equal(rows, shard.to(rows.device, rows.dtype))


hooks.keeps.update({"storage": SameAddress, True: Frozen, "host": OnHost})
hooks.keep_values.append(kept_for_evaluation)
