"""`ParamGroup`: the parameters of a unit that share a mesh; gathered and reduced together. Layer: runtime.

::

                 unshard             wait_for_unshard
    SHARDED          ----> GATHERING -----------------> UNSHARDED
    SMALLER, INNER   ---->
    SHARDED          <------------- reshard ----------- UNSHARDED, SMALLER, INNER
    SMALLER, INNER   <------------- reshard(to=...) --- UNSHARDED

The phase is kept only here; a parameter's form follows from it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import is_
from warnings import warn

import torch
from torch import nn

from fsdp2._torch import (
    backward_is_running,
    local_of,
    outside_transforms,
    profiler_is_on,
    storages_of,
    version,
    without_grad,
)
from fsdp2.disk.mapped import RestingShards, file_of
from fsdp2.errors import CollectiveError, OrderError
from fsdp2.events import emit, profiler_range
from fsdp2.mesh import MeshRoles
from fsdp2.nothing import NOTHING
from fsdp2.policies import Sharding
from fsdp2.runtime.changes import Changes, agrees
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gradients import Gradients, needs_grad
from fsdp2.runtime.host_copy import HostCopy
from fsdp2.runtime.memory import in_memory_order, lay_together
from fsdp2.runtime.parameter import ManagedParameter, check_stand_in
from fsdp2.runtime.slot import SlotTable
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.runtime.streams import streams_for
from fsdp2.runtime.unsharded import UnshardedStorage


class Phase(Enum):
    """Which form the parameters of a group have."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # the all-gather is in flight; the module still holds the previous form
    UNSHARDED = "unsharded"
    SMALLER = "smaller"  # sharded over the smaller post-forward mesh
    INNER = "inner"  # with sharded replicas: sharded in the module, but the inner shards stay


class Keep(Enum):
    """What a group keeps when it reshards."""

    NOTHING = "nothing"
    STORAGE = "storage"  # the memory, at the same address
    FROZEN = "frozen"  # the memory and its contents, while no parameter requires a gradient
    HOST = "host"  # a copy in host memory, while no parameter requires a gradient

    @staticmethod
    def wanted(zero: Sharding | None, is_frozen: bool) -> "Keep":
        """What a group of frozen, or other, parameters keeps."""
        if zero is None or not zero.keep_frozen or not is_frozen:
            return Keep.NOTHING
        return Keep.HOST if zero.keep_frozen == "host" else Keep.FROZEN


class ParamGroup:
    """Several parameters on one mesh.

    Args:
        params: at least one.
        on_ready: called in backward when the last trainable parameter's gradient has been accumulated.
        on_unannounced: called for each gradient of a backward that reached the unit by none of its outputs.

    Attributes:
        smaller: roles on the mesh to which `reshard(to=Phase.SMALLER)` reshards.
        users: ids of the units that use the unsharded parameters; more than one if weights are tied across units.
        conversions: how often the unsharded parameters were dropped, because the sharded ones are others.
        changing: each makes the current stream wait for what changes shards in the background (an offloaded step; one
            for each dtype), and forgets itself. Called with whether it is the all-gather stream that waits. Groups with
            the same shards may share the list.
    """

    def __init__(
        self, params: Sequence[ManagedParameter], on_ready: Callable[[], None], on_unannounced: Callable[[], None]
    ):
        self.roles = params[0].roles
        self.channel = Channel(self.roles)
        self.params = in_memory_order(params, self.channel)
        lay_together(self.params)
        self.gradients = Gradients(self.params, self.channel, on_ready, on_unannounced)
        self.changes = Changes(self.params, self.gradients)
        self.smaller: MeshRoles | None = None
        self.users: set[int] = set()
        self.keep = Keep.NOTHING
        self.changing: list[Callable[[bool], None]] = []
        self.phase = Phase.SHARDED
        self._unsharded: UnshardedStorage | None = None
        self.conversions = 0  # how often `_unsharded` was dropped
        # Versions of the sharded parameters. `_gathered_at`: those of the unsharded values. `_kept_at`: those whose
        # gathered values were kept at reshard. `_used_at`: at the last forward whose backward may still come, only for
        # parameters whose unsharded form shares memory.
        self._gathered_at: list[int] = []
        self._kept_at: list[int] | None = None
        self._used_at: list[int] | None = None
        self._host: HostCopy | None = None
        self._copies_at: list[int] | None = None  # versions of what is gathered now and will be copied to the host
        self._shards: list[torch.Tensor] = []
        # The sharded parameters, what the slots hold while sharded, local tensors, and the sharded parameters' own
        # storages, at the last `refresh`.
        self._sharded = [param.sharded for param in self.params]
        self._at_rest = [param.at_rest for param in self.params]
        self._locals = list(map(local_of, self._sharded))
        self._storages = storages_of(self._sharded)
        self._resting: RestingShards | None = None
        self._under_way: Callable[[], None] | None = None
        self._table: SlotTable | None = None

    @property
    def fqn(self) -> str:
        """FQN of the unit."""
        return self.channel.fqn

    # --- shard -> unshard -> reshard ---------------------------------------------------------------------------------

    def unshard(self, memory: ReleasedMemory, prefetching: bool = False) -> None:
        """Issue the all-gather, unless it is already issued. Collective over the shard group (after
        `reshard(to=Phase.SMALLER)`, over the smaller group). The parameters may be used after `wait_for_unshard`."""
        if self.phase in (Phase.GATHERING, Phase.UNSHARDED):
            return
        emit("unshard", self.channel.fqn)
        is_new = self._follow_conversion(memory)
        was_kept = self._kept_at is not None
        if was_kept and self._kept_is_current():
            self._under_way = lambda: None
        else:
            with profiler_range("FSDP::all_gather", self.channel.fqn) if profiler_is_on() else NOTHING:
                self._issue(memory, prefetching, is_new or was_kept)
        self.phase = Phase.GATHERING

    def _issue(self, memory: ReleasedMemory, prefetching: bool, is_used: bool) -> None:
        streams = memory.streams
        # Compute may still read or write the copies on the smaller mesh, memory that was not freed, and (`is_used`)
        # shards that were just converted, and values that were kept.
        in_use = self.phase is not Phase.SHARDED or self.keep is Keep.STORAGE or is_used
        resharded = streams.record() if in_use else None
        with without_grad(), streams.gathering():
            # Unsharded storage and the packed buffer are allocated, filled and freed on this stream. The compute stream
            # reads the unsharded storage after waiting for the event recorded below; `memory` keeps it until this
            # stream has waited for the end of that use. The packed buffer is only used on this stream.
            if resharded is not None:
                streams.wait(resharded)
            self.settle(gathering=True)
            if self.phase is not Phase.SMALLER:  # where copies are gathered, from before
                self._gathered_at = self._versions()
            memory.make_room(self._unsharded, prefetching)
            if self._unsharded is None:
                self._unsharded = UnshardedStorage(self.params, self.channel)
            finish = self._start(self._unsharded)
            if not streams.lazy:
                finish()
                finish = partial(streams.wait, streams.record())
            self._under_way = finish

    def _start(self, unsharded: UnshardedStorage) -> Callable[[], None]:
        """Start to fill the unsharded parameters. Returns what completes them."""
        if self.phase is Phase.SMALLER:
            assert self.smaller is not None
            return unsharded.start_smaller(self.smaller.shard)
        stays = self.keep is Keep.HOST and not any(param.sharded.requires_grad for param in self.params)
        versions = self._versions() if stays or self.channel.roles.sharded_replicas else []
        if self._host is not None and stays and self._host.versions == versions:
            return partial(unsharded.copy_from, self._host)
        self._host = None
        self._copies_at = versions if stays else None
        if self._resting is not None:
            self._resting.check()
        finish = unsharded.start(self._shards, versions)
        if self._resting is not None:
            self._resting.used()
        return finish

    def _copy_to_host(self) -> None:
        """Compute does not wait for the copy, and the next gather of these parameters does."""
        assert self._copies_at is not None
        with streams_for(self.roles.device).gathering():
            self._host, self._copies_at = HostCopy(self.params, self._copies_at), None

    def settle(self, gathering: bool = False) -> None:
        """Before the shards are read or changed: wait for what changes them in the background."""
        for wait in tuple(self.changing):
            wait(gathering)

    def _drop_unsharded(self) -> None:
        """The next unshard creates the unsharded parameters again. A gradient of those that a graph still holds would
        be lost."""
        self._host = self._unsharded = self._used_at = self._kept_at = None
        self.conversions += 1
        self.gradients.forget_unsharded()
        for param in self.params:
            if param.unsharded is not None and param.unsharded.requires_grad:
                param.unsharded.register_post_accumulate_grad_hook(partial(_refuse_gradient, param.fqn))

    def wait_for_unshard(self) -> None:
        """Make the unsharded parameters usable, and make the module hold them."""
        if self.phase is Phase.UNSHARDED:
            self.gradients.follow_unsharded()
        elif self.phase is Phase.GATHERING:
            self._finish_gathering()
        if self.phase is Phase.UNSHARDED and self.roles.shard_axis is None:
            self._check_aliases()

    def _finish_gathering(self) -> None:
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        try:
            named = profiler_range("FSDP::all_gather_copy_out", self.channel.fqn) if profiler_is_on() else NOTHING
            with named, without_grad():
                under_way()
                if self._copies_at is not None:
                    self._copy_to_host()
            self._check_slots()
        except BaseException:
            # Do not wait again. Keep the memory: a failed collective may still write to it.
            self._slots().put(self._at_rest)
            self.phase = Phase.SHARDED
            raise
        self.phase = Phase.UNSHARDED
        if self.smaller is not None:
            self._follow_resharded()
        if list(map(needs_grad, self._sharded)) != self.gradients.trainable:
            self.gradients.sync_trainable()
        self.changes.forget()
        (self._table or self._slots()).put(self.gradients.unsharded)
        if self.smaller is not None:
            self._drop_resharded()

    def abandon_gather(self) -> None:
        """Wait for an all-gather ahead that nobody will use. If it fails too, its failure is not the first."""
        if self.phase is Phase.GATHERING:
            with suppress(CollectiveError):
                self._finish_gathering()

    def reshard(self, memory: ReleasedMemory, to: Phase = Phase.SHARDED, keep_values: bool = False) -> None:
        """Free the unsharded parameters. `to` is `SHARDED`; `SMALLER`, where there is a smaller mesh; or `INNER`, with
        sharded replicas. `keep_values`: keep their memory, for an unshard before the shards change.

        Raises:
            OrderError: an unsharded parameter was changed in place, and `adopt_changes` was not called.
        """
        if self.phase is Phase.GATHERING:
            self._finish_gathering()  # prefetched but not used
        if self.phase is Phase.SHARDED or (self.phase is not Phase.UNSHARDED and to is not Phase.SHARDED):
            return
        emit("reshard", self.channel.fqn)
        unsharded = self._unsharded
        assert unsharded is not None
        if self.phase is Phase.UNSHARDED:
            self.changes.check_none()
            if list(map(needs_grad, self.gradients.unsharded)) != self.gradients.trainable:
                self.gradients.follow_unsharded()
            if to is Phase.SMALLER:
                assert self.smaller is not None
                with torch.no_grad():
                    unsharded.copies = [param.make_resharded(self.smaller) for param in self.params]
            if (self.keep is Keep.FROZEN and not self.gradients.has_trainable) or (keep_values and self._can_compare):
                self._kept_at = self._gathered_at
            elif self.keep is not Keep.STORAGE:
                memory.release(unsharded)
        if to is Phase.SHARDED and self.roles.sharded_replicas:
            with memory.streams.gathering():
                unsharded.source.free()
        forms = [param.resharded for param in self.params] if to is Phase.SMALLER else self._at_rest
        (self._table or self._slots()).put(forms)
        if to is not Phase.SMALLER and self.smaller is not None:
            unsharded.copies = []
            self._follow_resharded()
            self._drop_resharded()
        self.phase = to

    def _follow_resharded(self) -> None:
        if any(param.resharded is not None for param in self.params):
            self.gradients.follow([param.resharded for param in self.params])

    def _drop_resharded(self) -> None:
        for param in self.params:
            param.resharded = None

    def _slots(self) -> SlotTable:
        if self._table is None:
            self._table = SlotTable([param.slots for param in self.params])
        return self._table

    def _check_slots(self) -> None:
        """Raise if a parameter was replaced in the modules, because the replacement would be ignored."""
        forms: Sequence[nn.Parameter | None] = self._at_rest
        if self.smaller is not None:
            pairs = zip(self.params, forms, strict=True)
            forms = [form if param.resharded is None else param.resharded for param, form in pairs]
        for index, tensor in (self._table or self._slots()).others(forms):
            check_stand_in(self.params[index], tensor)

    def slots_changed(self) -> None:
        """A parameter got another name."""
        self._table = None

    def forget_kept(self, memory: ReleasedMemory) -> None:
        """Sharded parameters will change: free what was kept of the unsharded ones."""
        self._host = None
        if self.phase is Phase.SHARDED and self._unsharded is not None and self._kept_at is not None:
            self._kept_at = None
            memory.release(self._unsharded)

    @property
    def is_stale(self) -> bool:
        """Whether there are unsharded parameters, or copies on the smaller mesh, from before a change of the sharded
        ones."""
        if self.phase not in (Phase.GATHERING, Phase.UNSHARDED, Phase.SMALLER) or self._gathered_at == self._versions():
            return False
        return not all(param.aliases for param in self.params)

    def _kept_is_current(self) -> bool:
        """Whether the unsharded parameters that were kept equal what a gather would produce."""
        kept, self._kept_at = self._kept_at, None
        is_same = kept == self._versions()
        if self.keep is Keep.FROZEN and not self.gradients.has_trainable:
            return is_same
        if torch.is_grad_enabled():
            return False
        self.settle()
        return agrees(self.params, self.channel, is_same)

    @property
    def _can_compare(self) -> bool:
        """Whether kept values may be compared with the shards, and a gather communicates at all."""
        roles, is_plain = self.roles, not any(param.is_extended for param in self.params)
        return roles.shard_group is not None and not roles.sharded_replicas and is_plain and self.keep is not Keep.HOST

    def _versions(self) -> list[int]:
        """How often torch saw each sharded parameter change. Reads the DTensors' versions: all ranks run the same
        DTensor operators, while local tensors may change on some ranks only, and a gather that only some ranks issue
        would hang."""
        try:
            return list(map(version, self._sharded))
        except RuntimeError:  # made in inference mode: such tensors count no changes
            return []

    def adopt_changes(self) -> None:
        """Outside of forward and backward: copy changes of unsharded parameters into the shards, each rank its rows.

        Raises:
            OrderError: the shards were changed too.
        """
        if self.phase is not Phase.UNSHARDED or not (changed := self.changes.found()):
            return
        if self.is_stale:
            raise OrderError(
                f"'{changed[0].fqn}' was changed in place while it was unsharded, and its shards were changed too. "
                "Call reshard() on the module that holds it between the two. After this error call "
                "model.reset_iter_state(), which drops the change of the unsharded parameter."
            )
        with outside_transforms():
            self.settle()
            self.changes.adopt(changed)
        self._gathered_at = self._versions()

    def _check_aliases(self) -> None:
        """Unsharded parameters may share the memory of sharded ones. Then changing these between forward and backward
        makes gradients wrong, and autograd, which raises for a plain model, does not see it: raise in its place."""
        versions = [version(param.sharded) for param in self.params if param.aliases]
        if not backward_is_running():
            self._used_at = versions
        elif self._used_at is not None and versions != self._used_at:
            raise OrderError(
                f"unit '{self.fqn or '(root)'}': parameters changed between forward and backward; they are "
                "replicated and used as they are, so backward needs those of forward. Step the optimizer after "
                "backward."
            )

    def forget_use(self) -> None:
        """The forwards so far will have no backward."""
        self._used_at = None

    # --- following the sharded parameters ----------------------------------------------------------------------------

    def _follow_conversion(self, memory: ReleasedMemory) -> bool:
        """A module that is no unit may have been converted by itself (`model.head.float()`): its parameters have other
        local tensors now, and nobody has told the unit. Returns whether that was so."""
        if self.phase is not Phase.SHARDED or self.changing or self._has_known_locals():
            return False  # (these tensors are others while something changes them)
        with torch.inference_mode(False), torch.no_grad():
            self.forget_kept(memory)
            return self.refresh()

    def _has_known_locals(self) -> bool:
        return all(map(is_, map(local_of, self._sharded), self._locals))

    def warn_of_assigned_data(self) -> None:
        """Warn after ``param.data = ...`` of a sharded parameter, which changes nothing that a gather reads. (No error:
        transformers pads biases in this way, mostly by nothing.)"""
        if self.changing or (now := storages_of(self._sharded)) == self._storages:
            return
        if self._has_known_locals():  # otherwise a module was converted
            pairs = zip(self.params, now, self._storages, strict=True)
            fqn = next(param.fqn for param, new, before in pairs if new != before)
            warn(
                f"'{fqn}': its .data was assigned, which does not change the values of a DTensor. Copy instead: "
                "param.data.copy_(value), with a DTensor of the same placements; or change whole tensors within "
                "fsdp2.full_params(model).",
                stacklevel=2,
            )
        self._storages = now

    def take_back(self) -> str | None:
        """The same while unsharded: see `UnshardedStorage.take_back`."""
        if self.phase is not Phase.UNSHARDED:
            return None
        assert self._unsharded is not None
        return self._unsharded.take_back()

    def refresh(self) -> bool:
        """Adopt parameters that were moved, converted or replaced. Only while sharded. Returns whether any changed."""
        self.settle()
        changed = [param.refresh() for param in self.params]
        self.gradients.forget_plans()
        self._table = None
        if any(changed) or not self._shards or any(shard.is_meta for shard in self._shards):
            self._shards = [param.flat[: param.geometry.local_numel] for param in self.params]
            files = [file for param in self.params if (file := file_of(param.flat)) is not None]
            self._resting = RestingShards(files) if files else None
        if any(changed):
            self._drop_unsharded()
        self._sharded = [param.sharded for param in self.params]
        self._at_rest = [param.at_rest for param in self.params]
        self._locals = list(map(local_of, self._sharded))
        self._storages = storages_of(self._sharded)
        return any(changed)

    def lay_together(self) -> None:
        """Move the shards into one block of memory. Only while sharded, after `refresh`."""
        if lay_together(self.params):
            self._shards = []
            self.refresh()

    def channel_changed(self) -> None:
        """The channel has another `Comm`: forget what was planned for the previous one."""
        self.gradients.forget_plans()
        if self._unsharded is not None:
            self._unsharded.gathers.clear()

    def on_meta(self) -> list[str]:
        """FQNs of parameters that are on the meta device."""
        return [param.fqn for param in self.params if self._held(param).is_meta]

    def not_at_home(self) -> list[tuple[str, torch.device]]:
        """FQNs and devices of parameters that should be offloaded but are not."""
        return [
            (param.fqn, self._held(param).device)
            for param in self.params
            if param.plan.offload.home is not None and self._held(param).device != param.plan.home
        ]

    def _held(self, param: ManagedParameter) -> torch.Tensor:
        """The sharded parameter, or a replacement from a loader."""
        return param.held if self.phase is Phase.SHARDED else param.sharded


def _refuse_gradient(fqn: str, _param: torch.Tensor) -> None:
    raise OrderError(
        f"'{fqn}' was converted between forward and backward, so a gradient came for a parameter that is gone. "
        "Run the backward before to(dtype), or the forward again after it."
    )
