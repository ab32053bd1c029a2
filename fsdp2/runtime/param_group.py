"""`ParamGroup`: the parameters of a unit that share a mesh; gathered and reduced together. Layer: runtime.

::

                 unshard             wait_for_unshard
    SHARDED    ----------> GATHERING -----------------> UNSHARDED
    RESHARDED  ---------->
    SHARDED    <------------------- reshard ----------- UNSHARDED, RESHARDED
    RESHARDED  <-------------- reshard(smaller) ------- UNSHARDED

The phase has one home, here; a parameter's form follows from it.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch

from fsdp2._torch import local_tensor
from fsdp2.comm import comm_for
from fsdp2.comm.base import Pending
from fsdp2.events import emit
from fsdp2.layout import ShardLayout, pack
from fsdp2.mesh import MeshRoles
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.gradients import Gradients
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.storage import ALIGN_BYTES, FlatStorage
from fsdp2.runtime.streams import Streams

__all__ = ["Memory", "ParamGroup", "Phase"]


class Phase(Enum):
    """Which form the parameters of a group have."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # the module holds the form it had before, the all-gather is under way
    UNSHARDED = "unsharded"
    RESHARDED = "resharded"  # to the smaller post-forward mesh


_MOVES = {
    Phase.SHARDED: {Phase.GATHERING},
    Phase.GATHERING: {Phase.UNSHARDED},
    Phase.UNSHARDED: {Phase.SHARDED, Phase.RESHARDED},
    Phase.RESHARDED: {Phase.GATHERING, Phase.SHARDED},
}


class Memory(Protocol):
    """What a group needs of its context: streams, and a place to leave storage that compute may still read."""

    streams: Streams

    def make_room(self, storage: FlatStorage | None, prefetching: bool) -> None:
        """Called on the all-gather stream before `storage` (None: one not made yet) is taken."""

    def release(self, storage: FlatStorage) -> None:
        """The compute stream's use of `storage` ends with what is enqueued now."""


class ParamGroup:
    """Several parameters on one mesh.

    Args:
        params: at least one.
        on_ready: called in backward when the last trainable parameter's gradient has been accumulated.

    Attributes:
        fqn: of the unit, relative to the root once there is one.
        smaller: roles on the mesh to which `reshard(to_smaller=True)` reshards.
    """

    def __init__(self, params: Sequence[ManagedParameter], on_ready: Callable[[], None]):
        self.params = list(params)
        self.gradients = Gradients(self.params, on_ready)
        self.fqn = ""
        self.roles = params[0].roles
        self.smaller: MeshRoles | None = None
        self.phase = Phase.SHARDED
        self._storage: FlatStorage | None = None
        self._gathers: dict[int, Gather] = {}
        self._shards: list[torch.Tensor] = []
        self._under_way: Callable[[], None] | None = None

    # --- shard -> unshard -> reshard ---------------------------------------------------------------------------------

    def unshard(self, memory: Memory, prefetching: bool = False) -> None:
        """Issue the all-gather, unless it was. Collective over the shard group (after `reshard(to_smaller=True)`, over
        the smaller group). The parameters may be used after `wait_for_unshard`."""
        if self.phase in (Phase.GATHERING, Phase.UNSHARDED):
            return
        emit("unshard", self.fqn)
        streams = memory.streams
        resharded = streams.record() if self.phase is Phase.RESHARDED else None
        with torch.no_grad(), streams.gathering():
            # Unsharded storage and the packed buffer: allocated, filled and freed on this stream. The compute stream
            # reads the first after waiting for `gathered`; `memory` keeps it until this stream has waited for the end
            # of that use. The second never leaves this stream.
            streams.wait(resharded)
            memory.make_room(self._storage, prefetching)
            storage = self._storage or self._make_storage()
            storage.alloc()
            gather = self._gather()
            pending = gather.start(self.fqn, self._sources())
            if streams.lazy:
                self._under_way = lambda: self._finish(gather, pending)
            else:
                self._finish(gather, pending)
                gathered = streams.record()
                self._under_way = lambda: streams.wait(gathered)
        self._move(Phase.GATHERING)

    def _finish(self, gather: Gather, pending: Pending | None) -> None:
        with torch.no_grad():
            gather.finish(self.fqn, pending)

    def wait_for_unshard(self) -> None:
        """Make the unsharded parameters usable, and make the module hold them."""
        if self.phase is Phase.UNSHARDED:
            self.gradients.follow_unsharded()
        if self.phase is not Phase.GATHERING:
            return
        assert self._under_way is not None
        self._under_way()
        self._under_way = None
        self._move(Phase.UNSHARDED)
        self.gradients.sync_trainable()
        for param in self.params:
            assert param.unsharded is not None
            param.put(param.unsharded)
            param.resharded = None

    def reshard(self, memory: Memory, to_smaller: bool = False) -> None:
        """Give the unsharded parameters back; the module holds the sharded ones, or those on the smaller mesh."""
        if self.phase is Phase.GATHERING:
            self.wait_for_unshard()
        if self.phase is Phase.SHARDED or (self.phase is Phase.RESHARDED and to_smaller):
            return
        emit("reshard", self.fqn)
        if self.phase is Phase.UNSHARDED:
            self.gradients.follow_unsharded()
            if to_smaller:
                assert self.smaller is not None
                with torch.no_grad():
                    for param in self.params:
                        param.make_resharded(self.smaller)
            assert self._storage is not None
            memory.release(self._storage)
        for param in self.params:
            form = param.resharded if to_smaller else param.sharded
            assert form is not None
            param.put(form)
            if not to_smaller:
                param.resharded = None
        self._move(Phase.RESHARDED if to_smaller else Phase.SHARDED)

    def _move(self, phase: Phase) -> None:
        assert phase in _MOVES[self.phase], f"{self.fqn}: {self.phase} -> {phase}"
        self.phase = phase

    # --- what is made once -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take up parameters that were moved, converted or replaced. Only while sharded."""
        changed = [param.refresh() for param in self.params]
        if any(changed) or not self._shards:
            self._shards = [param.flat[: param.local_numel] for param in self.params]
        if any(changed) and self._storage is not None and any(self._is_stale(param) for param in self.params):
            self._storage, self._gathers = None, {}
            self.gradients.forget_unsharded()

    @staticmethod
    def _is_stale(param: ManagedParameter) -> bool:
        """Whether the unsharded parameter no longer fits the sharded one."""
        unsharded = param.unsharded
        assert unsharded is not None
        return unsharded.dtype != param.compute_dtype or unsharded.device != param.flat.device

    def on_meta(self) -> list[str]:
        """FQNs of parameters that have no data yet."""
        return [param.fqn for param in self.params if param.sharded.device.type == "meta"]

    def _make_storage(self) -> FlatStorage:
        """The flat storage of the group, and the unsharded parameters as views of it."""
        sizes = [param.layout.numel * param.compute_dtype.itemsize for param in self.params]
        offsets, total = pack(sizes, ALIGN_BYTES)
        with torch.inference_mode(False):
            storage = FlatStorage(total, self.params[0].flat.device)
            storage.alloc()
            for param, offset in zip(self.params, offsets, strict=True):
                param.make_unsharded(storage.view(offset, param.layout.shape, param.compute_dtype))
        self._storage = storage
        return storage

    def _gather(self) -> Gather:
        """The gather from the form that the parameters have now."""
        roles = self.roles if self.phase is Phase.SHARDED else self.smaller
        assert roles is not None
        if roles.shard_size not in self._gathers:
            with torch.inference_mode(False), torch.no_grad():
                layouts = [ShardLayout(p.layout.shape, p.layout.dim, roles.shard_size) for p in self.params]
                # `.data`: the same memory with a version counter of its own.
                fulls = [p.unsharded.data for p in self.params if p.unsharded is not None]
                comm = comm_for(roles.shard_group, self.params[0].flat.device)
                self._gathers[roles.shard_size] = Gather(layouts, fulls, roles, comm)
        return self._gathers[roles.shard_size]

    def _sources(self) -> list[torch.Tensor]:
        """This rank's shards, flat, in the form that the parameters have now."""
        if self.phase is Phase.SHARDED:
            return self._shards
        return [local_tensor(p.resharded).view(-1) for p in self.params if p.resharded is not None]
