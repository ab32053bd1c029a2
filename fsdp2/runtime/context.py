"""`Context`: the state that the units below one root share. Layer: runtime, top.

It owns the order of the iteration, the storage that waits to be freed, and the reductions in flight, each in a separate
object.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import ref

import torch

from fsdp2._torch import backward_is_running, outside_transforms, queue_backward_callback
from fsdp2.errors import OrderError, UnsupportedError
from fsdp2.events import emit, follow_listeners, profiler_range
from fsdp2.runtime.hooks import Hooks
from fsdp2.runtime.in_flight import InFlight, Ticket
from fsdp2.runtime.schedule import Schedule
from fsdp2.runtime.step import Step
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.runtime.streams import streams_for

Unit: TypeAlias = Any  # `runtime.unit.Unit`: that module is above this one


class Context:
    """The shared state of one root and the units below it.

    Args:
        units: the root first, then the others in the order of the module tree. Held weakly: modules own their units.
        in_flight: shared with other roots; None creates a new one.
        is_provisional: created for a unit that was unsharded before any forward; a root's forward replaces it.

    Attributes:
        root: a weak reference to the root.
        hooks: where features plug in; a provisional context calls none.
        recomputed: units whose forward a checkpoint recomputed in this backward, and which were not resharded since.
        post_optim_event: the event that the next root forward's all-gathers wait for, instead of the compute stream.
    """

    def __init__(
        self, units: Sequence[Unit], device: torch.device, is_provisional: bool, in_flight: InFlight | None = None
    ):
        self.streams = streams_for(device)
        self.memory = ReleasedMemory(self.streams)
        self.in_flight = InFlight() if in_flight is None else in_flight
        self.step = Step()
        self.hooks = Hooks()
        self.schedule = Schedule()
        self.is_provisional = is_provisional
        self.post_optim_event: torch.Event | None = None
        self._units = [ref(unit) for unit in units]
        self.root = self._units[0]
        self.recomputed: deque[ref[Unit]] = deque()

    @property
    def units(self) -> list[Unit]:
        """The units that are still alive, root first."""
        return [unit for weak in self._units if (unit := weak()) is not None]

    @property
    def is_last_backward(self) -> bool:
        """Whether this backward is the last of a step: set by the user or, in manual mode, while it is finalised."""
        if self.step.is_manual or self.step.is_finalizing:
            return self.step.is_finalizing
        root = self.root()
        return root is None or root.settings.is_last_backward

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward starts."""
        self.in_flight.check_nobody_waits(f"forward of '{self.units[0].fqn}'")
        follow_listeners()
        emit("root_pre_forward", self.units[0].fqn)
        has_raised = self.schedule.in_root_forward  # the last forward has not ended
        for unit in self.units:
            unit.complete_forward()
            if not self.step.awaits_backward:
                unit.forget_uses()
            if has_raised:
                unit.reshard()  # prefetched but not used: parameters may have changed since
            unit.drop_stale()
        self.schedule.begin_forward()
        self.follow_compute(self.post_optim_event)
        self.post_optim_event = None

    def follow_compute(self, event: torch.Event | None = None) -> None:
        """Let all-gathers start only after `event`, or after all work enqueued on the compute stream so far (which may
        have changed the shards)."""
        event = event or self.streams.record()
        with self.streams.gathering():
            self.streams.wait(event)

    def end_forward(self) -> None:
        """The root's forward is over."""
        for unit in self.units:
            unit.complete_forward()
        self.schedule.end_forward()
        for hook in self.hooks.after_forward:
            hook()
        if not torch.is_grad_enabled():
            self._wait_for_host_memory()  # before the all-gather stream has to wait for compute
        else:  # an evaluation between a forward and its backward changes nothing
            self.step.awaits_backward = not backward_is_running()
        self.memory.free_all()  # the next all-gather may be far away

    def _wait_for_host_memory(self) -> None:
        """Let the host wait until shards that are offloaded have been copied from its memory: it may change them next,
        and no order of streams applies to that. (After a backward it has waited for gradients.)"""
        groups = (group for unit in self.units for group in unit.groups)
        if any(group.params[0].plan.home != group.roles.device for group in groups):
            with self.streams.gathering():
                copied = self.streams.record()
            if copied is not None:
                copied.synchronize()

    # --- backward ----------------------------------------------------------------------------------------------------

    def expect_end_of_backward(self) -> None:
        """Called from within a backward pass: `end_backward` will run at its end.

        Raises:
            OrderError: the last backward raised, and `reset_iter_state` was not called.
            UnsupportedError: backward runs under compiled autograd, which never runs callbacks at the end.
        """
        if not self.step.in_backward():
            if torch.compiler.is_compiling():
                _refuse_compiled_autograd()
            end = self.end_backward
            self.step.begin_backward(end, self.units[0].settings.manual_finalization)
            self.in_flight.limit(self, max(unit.settings.max_input_buffers for unit in self.units))
            queue_backward_callback(end)

    def end_backward(self) -> None:
        """The backward pass is over: finish all units. The last backward of a step also waits for all reductions."""
        with profiler_range("FSDP::root_post_backward_callback"):
            self.recomputed.clear()
            root = self.units[0]
            self._finish_units()
            if self.is_last_backward:
                for hook in self.hooks.before_wait:
                    hook()
                self.finish_reductions()
            for hook in self.hooks.after_backward:
                hook()
            emit("root_post_backward", root.fqn)
            self.step.end_backward()  # the last: after an error above a forward must not go on

    def _finish_units(self) -> None:
        for hook in self.hooks.before_last_reductions:
            hook()
        for unit in self.units:
            unit.finish_backward()

    def finish_reductions(self) -> None:
        """Complete all sharded gradients, and free released storage."""
        with outside_transforms():
            self.in_flight.finish_all()
            self.memory.free_all()

    def finalize(self, is_async: bool) -> Ticket | None:
        """Reduce the gradients that manual backwards left, and reshard. Returns the ticket for `finish_ticket`; None if
        there is nothing to wait for.

        Raises:
            OrderError: called at the wrong time (see `Step`), HSDP gradients wait for an all-reduce, or a hook
                refuses.
        """
        root = self.units[0]
        self.step.check_can_finalize(root.fqn, root.settings.manual_finalization)
        self.in_flight.check_nobody_waits(f"finalize_backward of '{root.fqn}'")
        if not self.step.is_due:
            return None
        for hook in self.hooks.before_finalize:
            hook()
        for unit in self.units:
            unit.check_no_partials()
        self.step.reset()
        self.step.is_finalizing = True
        try:
            self._finish_units()
        finally:
            self.step.is_finalizing = False
        if not is_async:
            self.finish_reductions()
        self.in_flight.ticket = Ticket(self.step) if is_async else None
        return self.in_flight.ticket

    def finish_ticket(self, ticket: Ticket) -> None:
        """Wait for an asynchronous finalisation; does nothing the second time. Raises `OrderError` if it was
        discarded."""
        if ticket.is_void:
            raise OrderError("this handle's reductions were thrown away by reset_iter_state()")
        if self.in_flight.ticket is ticket:
            self.in_flight.ticket = None
            self.finish_reductions()

    # --- after an error ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for reductions, discard their results, and forget the iteration, in all units. Raises `OrderError` if
        they belong to another root that shares them, whose handle has not been waited for."""
        ticket, self.in_flight.ticket = self.in_flight.ticket, None
        if ticket is not None and ticket.owner() is not self.step:
            self.in_flight.ticket = ticket
            raise OrderError(
                "reset_iter_state: another root's finalize_backward(async_op=True) is not finished; wait()"
            )
        if ticket is not None:
            ticket.is_void = True
        for hook in self.hooks.on_reset:
            hook()
        self.in_flight.abandon_all()
        self.recomputed.clear()
        self.step.reset()
        self.schedule.end_forward()
        for unit in self.units:
            unit.reset()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled_autograd() -> None:
    raise UnsupportedError(
        "backward runs under compiled autograd, which does not call back at its end, so that gradients would stay "
        "unreduced. Turn it off (compiled_autograd in the configuration of Dynamo); torch.compile of the model or of "
        "its blocks is fine."
    )
