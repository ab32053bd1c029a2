"""`Context`: what the units below one root share. Layer: runtime, top.

It owns the order of the iteration, the storage that waits to be freed, and the reductions in flight.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import ref

import torch

from fsdp2._torch import backward_is_running, queue_backward_callback
from fsdp2.errors import OrderError
from fsdp2.events import emit
from fsdp2.policies import UnitSettings
from fsdp2.runtime.reduction import Reduction
from fsdp2.runtime.schedule import Schedule
from fsdp2.runtime.storage import FlatStorage
from fsdp2.runtime.streams import streams_for

__all__ = ["Context"]


class Member(Protocol):
    """What a context needs of its units."""

    settings: UnitSettings
    fqn: str

    def unshard(self, prefetching: bool = False) -> None:
        """Issue the all-gathers that are needed."""

    def complete_forward(self) -> None:
        """The root's forward is over: finish a unit of which some modules did not run."""

    def finish_backward(self) -> None:
        """The backward pass is over: reduce and reshard what is left."""


class Context:
    """The shared state of one root and the units below it.

    Args:
        units: the root first, then the others in the order of the module tree. Held weakly: modules own their units.
        is_provisional: made for a unit that was unsharded before any forward; a root's forward replaces it.

    Attributes:
        recomputed: units whose forward a checkpoint ran again in this backward, and which were not resharded after it.
        post_optim_event: waited for by the next root forward's all-gathers in place of the compute stream.
    """

    def __init__(self, units: Sequence[Member], device: torch.device, is_provisional: bool):
        self.streams = streams_for(device)
        self.schedule: Schedule[Member] = Schedule()
        self.is_provisional = is_provisional
        self.post_optim_event: torch.Event | None = None
        self._units = [ref(unit) for unit in units]
        self.recomputed: deque[ref[Member]] = deque()
        self._released: deque[tuple[FlatStorage, torch.Event | None]] = deque()
        self._reductions: deque[Reduction] = deque()
        self._max_reductions = 1
        self._callback_queued = False

    @property
    def units(self) -> list[Member]:
        """The units that still live, root first."""
        return [unit for weak in self._units if (unit := weak()) is not None]

    @property
    def root(self) -> Member | None:
        """The root, while it lives."""
        return self._units[0]()

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward starts."""
        emit("root_pre_forward", self.units[0].fqn)
        for unit in self.units:
            unit.complete_forward()  # what a forward that raised has left
        self.schedule.begin_forward()
        self.follow_compute(self.post_optim_event)
        self.post_optim_event = None

    def follow_compute(self, event: torch.Event | None = None) -> None:
        """Let all-gathers start only after `event`, or what compute was given so far (it changed the shards)."""
        event = event or self.streams.record()
        with self.streams.gathering():
            self.streams.wait(event)

    def end_forward(self) -> None:
        """The root's forward is over."""
        for unit in self.units:
            unit.complete_forward()
        self.schedule.end_forward()

    # --- memory ------------------------------------------------------------------------------------------------------

    def make_room(self, storage: FlatStorage | None, prefetching: bool) -> None:
        """See `Memory.make_room`. On the all-gather stream: wait for the end of compute's use of released storage, and
        free it, until no more than two units are alive. `storage` itself, if released, is taken back."""
        for entry in [entry for entry in self._released if entry[0] is storage]:
            self._released.remove(entry)
            self.streams.wait(entry[1])
        while len(self._released) > self.schedule.num_kept(prefetching):
            self._free_oldest()

    def release(self, storage: FlatStorage) -> None:
        """See `Memory.release`. The storage stays allocated until the all-gather stream has waited for the event that
        marks compute's last use; until then this context keeps it."""
        self._released.append((storage, self.streams.record()))
        if self.streams.lazy:
            self._free_oldest()

    def free_released(self) -> None:
        """Free all released storage, once compute is through with it."""
        with self.streams.gathering():
            while self._released:
                self._free_oldest()

    def _free_oldest(self) -> None:
        storage, event = self._released.popleft()
        self.streams.wait(event)
        storage.free()

    # --- backward ----------------------------------------------------------------------------------------------------

    def expect_end_of_backward(self) -> None:
        """Called from within a backward pass: `_end_backward` will run at its end."""
        if not self._callback_queued:
            self._callback_queued = True
            self._max_reductions = max(unit.settings.max_input_buffers for unit in self.units)
            queue_backward_callback(self._end_backward)

    def _advance_oldest(self) -> None:
        """In a function of its own: what is finished must be freed before the next reduction makes its buffers."""
        oldest = self._reductions.popleft()
        if oldest.advance():
            self._reductions.append(oldest)

    def check_backward_ended(self) -> None:
        """Called before a forward.

        Raises:
            OrderError: the last backward raised, and nothing was reset since.
        """
        if self._callback_queued and not backward_is_running():
            raise OrderError(
                "forward was called, but the last backward has not finished; did it raise? Call reset_iter_state() on "
                "the root, on every rank, before the next iteration."
            )

    def reduce(self, reductions: Sequence[Reduction]) -> None:
        """Start reductions; those in flight move on, and the oldest are finished when there are too many."""
        for reduction in reductions:
            num_due = len(self._reductions) - self._max_reductions + 1
            for _ in range(num_due):
                self._advance_oldest()
            if reduction.advance():
                self._reductions.append(reduction)

    def finish_partials(self) -> None:
        """Finish what an all-reduce that is issued next must include."""
        while any(reduction.leaves_partials for reduction in self._reductions):
            self._reductions.popleft().finish()

    def _end_backward(self) -> None:
        self._callback_queued = False
        self.recomputed.clear()
        root = self.units[0]
        for unit in self.units:
            unit.finish_backward()
        if root.settings.is_last_backward:
            self.wait_for_reductions()
            self.free_released()
        emit("root_post_backward", root.fqn)

    def wait_for_reductions(self) -> None:
        """Finish every reduction in flight, oldest first."""
        while self._reductions:
            self._reductions.popleft().finish()

    # --- after an error ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for reductions, throw their results away, and forget the iteration."""
        while self._reductions:
            self._reductions.popleft().abandon()
        self._callback_queued = False
        self.recomputed.clear()
        self.schedule.end_forward()
