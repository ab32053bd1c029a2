"""`Bucket`: the memory and the phase of the parameters of a unit that share a mesh. Layer: runtime.

For a weight (6, 4) and a bias (6,) on 2 ranks, with the numbers of elements::

    at rest      rank 0: | 12 |  | 3 |       rank 1: | 12 |  | 3 |       own rows: `ManagedParameter.flat`
    gathering    | 12 of 24     | 3 of 6     |                           own rows are copied in (`Gather`)
    unsharded    | weight: 24   | bias: 6    |                           one storage (`Shards`), freed at reshard
    gradients    | 24 |  | 6 |       ->      | 12 | 3 |                  `Gradients`, `Reduction`

The phase is kept only here; a parameter's form follows from it::

                     unshard             wait_for_unshard
    SHARDED, PART        ----> GATHERING -----------------> UNSHARDED
    SHARDED              <------------- reshard ----------- UNSHARDED, PART
    PART                 <--- reshard(Stays.PART, SMALLER)  UNSHARDED
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from fsdp2._torch import local_of, outside_transforms, profiler_is_on, version
from fsdp2.errors import OrderError
from fsdp2.events import emit, profiler_range
from fsdp2.mesh import MeshRoles
from fsdp2.nothing import NOTHING
from fsdp2.runtime import hooks
from fsdp2.runtime.changes import Changes, Seen, check_stand_in, grad_dtype_of
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gradients import Gradients, needs_grad
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Source, Unchosen
from fsdp2.runtime.state import Stays
from fsdp2.runtime.storage import ReleasedMemory


class Phase(Enum):
    """Which form the parameters of a group have."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # the all-gather is in flight; the module still holds the previous form
    UNSHARDED = "unsharded"
    PART = "part"  # the source keeps some of the values for the next unshard, such as those of a smaller mesh


class Bucket:
    """Several parameters on one mesh.

    Args:
        params: at least one.
        on_ready: called in backward when the last trainable parameter's gradient has been accumulated.
        on_unannounced: called for each gradient of a backward that did not pass through the unit's outputs.

    Attributes:
        smaller: the smaller mesh to reshard to after forward, if any.
        users: ids of the units that use the unsharded parameters; more than one if weights are tied across units.
        keep: what to keep at reshard, a key of `hooks.keeps`; False for nothing.
        changing: functions that make the current stream wait for a background change of the shards (an offloaded step),
            and remove themselves. Argument: whether that is the all-gather stream. Shared by groups with equal shards.
        source: the memory of the unsharded parameters, and how it is filled.
        conversions: how often the unsharded parameters were dropped, because parameters were converted or replaced.
        seen: the sharded parameters as they were when the step began.
    """

    def __init__(
        self, params: Sequence[ManagedParameter], on_ready: Callable[[], None], on_unannounced: Callable[[], None]
    ):
        self.roles = params[0].roles
        self.channel = Channel(self.roles, params[0].plan.policy.reduce_scatter_dtype)
        self.params = list(params)
        for order in hooks.orders:
            order(self.params, self.channel)
        for place in hooks.shards_made:
            place(self.params)
        self.gradients = Gradients(self.params, self.channel, on_ready, on_unannounced)
        self.changes = Changes(self.params, self.gradients)
        self.smaller: MeshRoles | None = None
        self.users: set[int] = set()
        self.keep: Any = False
        self.changing: list[Callable[[bool], None]] = []
        self.phase = Phase.SHARDED
        self.source: Source = Unchosen()
        self.conversions = 0
        self.seen = Seen(self.params)
        self._under_way: Callable[[], None] | None = None

    # --- shard -> unshard -> reshard ---------------------------------------------------------------------------------

    def unshard(self, memory: ReleasedMemory, prefetching: bool = False) -> None:
        """Issue the all-gather, unless it was issued already. Collective over the shard group (after a reshard to a
        smaller mesh, over that). The parameters may be used after `wait_for_unshard`."""
        if self.phase is Phase.GATHERING or self.phase is Phase.UNSHARDED:
            return
        emit("unshard", self.channel.fqn)
        follows_compute = self.phase is Phase.PART or self.source.follows_compute
        has_shards = self.phase is Phase.SHARDED and not self.changing
        if has_shards and self.seen.ids != [*map(id, map(local_of, self.seen.sharded))]:  # changed since the step began
            self._follow_shards(memory)
            follows_compute = True
        source, streams = self.source, memory.streams
        used = streams.record() if follows_compute else None
        named = profiler_range("FSDP::all_gather", self.channel.fqn) if profiler_is_on() else NOTHING
        with named, streams.gathering():
            # Unsharded storage and packed buffer are allocated, filled and freed on this stream. Compute reads the
            # unsharded storage after the event recorded below; `memory` keeps it until this stream has waited for the
            # end of that use. The packed buffer is used only on this stream.
            streams.wait(used)
            for wait in tuple(self.changing):
                wait(True)
            if memory.released:
                memory.make_room(source.base, prefetching)
            finish = source.start(self)
            if not streams.lazy:
                finish()
                finish = partial(streams.wait, streams.record())
        self._under_way, self.phase = finish, Phase.GATHERING

    def settle(self) -> None:
        """Wait for background changes of the shards, before they are read or changed."""
        for wait in tuple(self.changing):
            wait(False)

    def wait_for_unshard(self) -> None:
        """Make the unsharded parameters usable, and put them into the modules."""
        if self.phase is Phase.GATHERING:
            self._finish_gathering()
        if self.roles.shard_axis is None:
            self.changes.check_use(self.channel.fqn)

    def _finish_gathering(self) -> None:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        try:
            named = profiler_range("FSDP::all_gather_copy_out", self.channel.fqn) if profiler_is_on() else NOTHING
            with named:
                under_way()
            if self.source.keeps:
                self.source.arrived(self)
            for index, tensor in self.seen.slots.replaced():  # set by the user; they would be ignored
                check_stand_in(self.params[index], tensor)
        except BaseException:
            # Do not wait again. Keep the memory: a failed collective may still write to it.
            self.seen.slots.put(self.seen.at_rest)
            self.phase = Phase.SHARDED
            raise
        self.phase = Phase.UNSHARDED
        if not self.gradients.unsharded:
            self.gradients.sync_trainable()
            self.changes.forget()
        elif list(map(needs_grad, self.seen.sharded)) != self.gradients.trainable:
            self.gradients.sync_trainable()
        self.seen.slots.put(self.gradients.unsharded)

    def reshard(self, memory: ReleasedMemory, stays: Stays = Stays.NOTHING) -> None:
        """Free the unsharded parameters and any kept values, except for what `stays`.

        Raises:
            OrderError: an unsharded parameter was changed in place, and `adopt_changes` was not called.
        """
        if self.phase is Phase.GATHERING:
            self._finish_gathering()  # prefetched but not used
        keeps_part = stays in self.source.keeps
        if self.phase is Phase.SHARDED or (self.phase is Phase.PART and keeps_part):
            return
        emit("reshard", self.channel.fqn)
        source, forms = self.source, self.seen.at_rest
        if self.phase is Phase.UNSHARDED:
            if list(map(version, self.gradients.unsharded)) != self.changes.versions:
                self.changes.check_none()
            if keeps_part:
                forms = source.keep_part(self) or forms
            for wrap in hooks.keep_values if stays is Stays.VALUES else ():
                source = self.source = wrap(source)
            source.release(self, memory, stays)
        self.seen.slots.put(forms)
        if source.keeps and not keeps_part:
            with memory.streams.gathering():
                source.drop_part(self)
        self.phase = Phase.PART if keeps_part else Phase.SHARDED

    def clear(self, memory: ReleasedMemory, to_change: bool) -> None:
        """Reshard, because the sharded parameters are about to be read or (`to_change`) changed."""
        self.settle()
        is_converted = self.phase is Phase.UNSHARDED and any(self.changes.converted())
        self.adopt_changes()
        self.reshard(memory)
        if to_change:
            self.source.forget(memory)
        if is_converted:
            self._drop_unsharded()

    # --- between steps -----------------------------------------------------------------------------------------------

    def follow_changes(self, memory: ReleasedMemory) -> bool:
        """Before a step: adopt what the user did to the parameters since the last one. Returns whether the unsharded
        parameters are stale: gathered before a change of the sharded ones.

        Raises:
            OrderError: unsharded parameters were moved or converted.
        """
        if self.seen.grad_dtypes != list(map(grad_dtype_of, self.seen.sharded)):
            self._follow_grad_dtypes()
        if self.phase is Phase.SHARDED:
            if not self.changing and self.seen.fingerprint() != self.seen.known:  # while changing, these are stand-ins
                self._follow_shards(memory)
            self.seen.versions = self.seen.now()
            return False
        self.changes.check_unconverted()
        self.adopt_changes()
        is_stale = self.is_stale
        self.seen.versions = self.seen.now()
        return is_stale

    def _follow_shards(self, memory: ReleasedMemory) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self.seen.is_converted():
                self.source.forget(memory)
                self.refresh()
            else:
                self.seen.warn_of_assigned_data()
                self.seen = Seen(self.params)

    def _follow_grad_dtypes(self) -> None:
        for param in self.params:
            param.follow_grad_dtype()
        self.seen.grad_dtypes = list(map(grad_dtype_of, self.seen.sharded))
        self.gradients.forget_plans()

    @property
    def is_stale(self) -> bool:
        """Whether unsharded parameters, or parts of them, were gathered before a change of the sharded ones."""
        is_same = self.phase is Phase.SHARDED or self.seen.versions == self.seen.now()
        return not (is_same or all(param.aliases for param in self.params))

    def adopt_changes(self) -> None:
        """Outside of forward and backward: copy changes of unsharded parameters into the shards (each rank its rows),
        and freeze or unfreeze the sharded parameters accordingly.

        Raises:
            OrderError: the shards were changed too.
        """
        if self.phase is not Phase.UNSHARDED:
            return
        self.gradients.follow_unsharded()
        if not (changed := self.changes.found()):
            return
        with outside_transforms():
            self.settle()
            self.changes.adopt(changed, self.is_stale)
        self.seen.versions = self.seen.now()

    # --- following the modules ---------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Adopt parameters that were moved, converted or replaced. Only while sharded. Returns whether any changed."""
        self.settle()
        is_changed = sum(param.refresh() for param in self.params) > 0
        self._follow_grad_dtypes()
        self.seen = Seen(self.params)
        if is_changed:
            self._drop_unsharded()
        return is_changed

    def _drop_unsharded(self) -> None:
        """The next unshard makes new ones. A backward through the current ones raises: the gradient would be lost."""
        for param in self.params:
            if param.unsharded is not None and param.unsharded.requires_grad:
                get_gradient_edge(param.unsharded).node.register_prehook(partial(_refuse_gradient, param.fqn))
        self.source = Unchosen()
        self.conversions += 1
        self.changes.forget_use()
        self.gradients.forget_unsharded()

    def lay_together(self) -> None:
        """Place moved shards next to each other. Only while sharded, after `refresh`."""
        if any(place(self.params) for place in hooks.shards_made):
            self.refresh()

    def channel_changed(self) -> None:
        """The channel has a new `Comm`: drop what was planned for the previous one."""
        self.gradients.forget_plans()
        self.source.forget_plans()


def _refuse_gradient(fqn: str, *_: object) -> None:
    raise OrderError(
        f"'{fqn}' was converted between forward and backward, so this gradient belongs to a parameter that "
        "no longer exists. Run the backward before to(dtype), or the forward again after it."
    )
