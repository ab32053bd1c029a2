"""What a group keeps at reshard, so that it need not allocate or gather again. Layer: extras.

==================  ================================================================================================
`SameAddress`       the memory, not its values: `set_keep_unsharded_storage`
`Frozen`, `OnHost`  frozen parameters, on the device or as a copy in host memory: `ZeroPolicy(keep_frozen=...)`
`Evaluated`         a root's, between two forwards without gradients, unless the shards of any rank change
==================  ================================================================================================
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.shared import is_fake
from fsdp2.extras.host_memory import host
from fsdp2.extras.in_place import own_rows
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Around, Source, wrapped
from fsdp2.runtime.state import Stays
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.runtime.streams import streams_for
from fsdp2.settings import units_of
from fsdp2.watch.exchange import Exchange, at_once


class SameAddress(Around):
    """Keeps the memory. The next gather writes to it while compute may still read it, so it waits for compute."""

    @property
    def follows_compute(self) -> bool:  # type: ignore[override]
        return True

    def release(self, group: Bucket, memory: ReleasedMemory, stays: Stays) -> None:
        pass


class Keeping(Around):
    """Keeps memory and values when `keep` is called.

    Attributes:
        is_current: whether the kept values are those that a gather would give, as a function; None if nothing is kept.
    """

    is_current: Callable[[], bool] | None = None

    @property
    def follows_compute(self) -> bool:  # type: ignore[override]
        return self.is_current is not None or self.inner.follows_compute

    def keep(self, is_current: Callable[[], bool]) -> None:
        """Called instead of a release."""
        self.is_current = is_current

    def start(self, group: Bucket) -> Callable[[], None]:
        is_current, self.is_current = self.is_current, None
        return _nothing if is_current is not None and is_current() else self.inner.start(group)

    def forget(self, memory: ReleasedMemory) -> None:
        if self.is_current is not None:
            self.is_current = None
            memory.release(self.base)
        self.inner.forget(memory)


class Frozen(Keeping):
    """Keeps while no parameter of the group requires a gradient."""

    def release(self, group: Bucket, memory: ReleasedMemory, stays: Stays) -> None:
        if any(group.gradients.trainable):
            self.inner.release(group, memory, stays)
        else:
            versions = group.seen.versions
            self.keep(lambda: versions == group.seen.now())


class Evaluated(Keeping):
    """Keeps after a forward without gradients, if the group's values can be compared with the shards, and its gather
    communicates."""

    def release(self, group: Bucket, memory: ReleasedMemory, stays: Stays) -> None:
        roles, is_extended = group.roles, any(param.is_extended for param in group.params)
        gathers = roles.shard_group is not None and not roles.sharded_replicas
        is_kept = group.keep == "host" or (group.keep is True and not any(group.gradients.trainable))
        if stays is Stays.VALUES and gathers and not is_extended and not is_kept:
            self.keep(partial(_agrees, group, group.seen.versions))
        else:
            self.inner.release(group, memory, stays)


class OnHost(Around):
    """Copies the whole values to host memory at the first reshard, and from there instead of later gathers. Both run on
    the all-gather stream, the only one that uses the memory, so neither the host nor compute waits."""

    copy: "HostCopy | None" = None

    def start(self, group: Bucket) -> Callable[[], None]:
        if self.copy is not None and self.copy.versions == group.seen.now() and _is_frozen(group):
            self.base.alloc()
            return partial(self.copy.copy_to, group.params)
        self.copy = None
        return self.inner.start(group)

    def release(self, group: Bucket, memory: ReleasedMemory, stays: Stays) -> None:
        if self.copy is None and _is_frozen(group):
            with torch.no_grad(), memory.streams.gathering():
                self.copy = HostCopy(group.params, group.seen.versions)
        self.inner.release(group, memory, stays)

    def forget(self, memory: ReleasedMemory) -> None:
        self.copy = None
        self.inner.forget(memory)


def _is_frozen(group: Bucket) -> bool:
    return not any(param.sharded.requires_grad for param in group.params)


class HostCopy:
    """The whole values of `params`, which are gathered and plain, in the compute dtype; page-locked if the device is an
    accelerator. `versions`: those of the sharded parameters when they were gathered."""

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


def _for_evaluation(source: Source) -> Source:
    return source if isinstance(source, Evaluated) else Evaluated(source)


def _nothing() -> None:
    """Nothing to complete."""


def _agrees(group: Bucket, versions: list[int]) -> bool:
    """Whether the shards of all ranks have the values that were gathered and kept. Collective over the shard group: one
    number. The host waits for it, since it decides what is gathered next; it is not called within a step. It compares
    values because no counter sees all changes: `tensor.data` and foreach operators do not count on a DTensor."""
    if torch.is_grad_enabled():
        return False
    group.settle()
    is_same, shard_group = versions == group.seen.now(), group.roles.shard_group
    assert shard_group is not None
    if is_fake(group.params[0].flat):
        return is_same
    differ = not (is_same and all(map(_has_shard, group.params)))
    flag = torch.tensor([differ], dtype=torch.int32, device=group.roles.device)
    with at_once(Exchange("comparison of kept values", group.channel.fqn, shard_group, device=flag.device)):
        dist.all_reduce(flag, dist.ReduceOp.MAX, shard_group)
    return not flag.item()


def _has_shard(param: ManagedParameter) -> bool:
    rows, shard = own_rows(param)
    return torch.equal(rows, shard.to(rows.device, rows.dtype))


def set_keep(group: Bucket, keep: Any) -> None:
    """Set what the group keeps at reshard: a key of `hooks.keeps`; False for nothing."""
    if group.phase is Phase.PART:
        group.seen.slots.put(group.seen.at_rest)
        with streams_for(group.roles.device).gathering():
            group.source.drop_part(group)
        group.phase = Phase.SHARDED
    group.keep = keep
    group.source = wrapped(group.source, group)


def _keep_storage(module: object, enable: bool, recurse: bool) -> None:
    for unit in units_of(module, recurse):
        zero = unit.settings.zero
        for group in unit.groups:
            is_frozen = not any(param.sharded.requires_grad for param in group.params)
            set_keep(group, "storage" if enable else zero is not None and is_frozen and zero.keep_frozen)


hooks.setters["set_keep_unsharded_storage"] = _keep_storage
hooks.keeps.update({"storage": SameAddress, True: Frozen, "host": OnHost})
hooks.keep_values.append(_for_evaluation)
