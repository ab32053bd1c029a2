"""`Step`: what the units below one root share in a step: their order, memory, reductions. Layer: runtime, top.

One step of a root with units 0, 1, 2 that reshard after forward (time runs right; ``A`` all-gather, ``C`` compute,
``R`` reduction; entries in one column may overlap)::

    forward   compute stream       C0  C1  C2
              gather stream    A0  A1  A2            A1 is issued before C0 ends: the host is ahead
    backward  compute stream       C2  C1  C0
              gather stream    A2  A1  A0            A1 is issued by unit 2, before its compute
              reduce stream            R2  R1  R0    R2 starts at unit 2's last gradient

Backward prefetches in the reverse of the order in which forward ran the units. Each forward of the root records its
order in a `Pass`, and the backward hook of a unit keeps its position there. So the order is right even if a unit ran
twice, two forwards share one backward, or a forward had no backward.

After a backward that raised, the next forward or backward is an error, until `reset`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch

from fsdp2._torch import backward_is_running, outside_transforms, queue_backward_callback
from fsdp2.errors import OrderError, UnsupportedError
from fsdp2.events import emit, follow_listeners, profiler_range
from fsdp2.runtime.backward import finish_backward
from fsdp2.runtime.hooks import Hooks
from fsdp2.runtime.in_flight import InFlight
from fsdp2.runtime.state import Stage, is_running
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.runtime.streams import streams_for

Unit: TypeAlias = Any  # `runtime.unit.Unit`: that module is above this one


class Pass:
    """The units that one forward ran, in the order in which they finished. `notes`: what features keep of it for its
    backward, by names of their own."""

    def __init__(self, notes: dict[str, Any] | None = None) -> None:
        self.notes: dict[str, Any] = {} if notes is None else notes
        self._order: list[Unit] = []

    def record(self, unit: Unit) -> int:
        """Record that `unit` finished its forward. Returns its position."""
        self._order.append(unit)
        return len(self._order) - 1

    def before(self, position: int) -> Unit | None:
        """The unit that ran before the one at `position`; None for the first. The same unit several times in a row
        counts once, because the modules of a list finish one by one."""
        unit = self._order[position]
        while position and self._order[position] is unit:
            position -= 1
        found = self._order[position]
        return None if found is unit else found


class Step:
    """The shared state of one root and the units below it.

    Args:
        units: the root first, then the others in the order of the module tree. Held weakly: modules own their units.
        reductions: shared with other roots; None creates new ones.
        is_provisional: created for a unit that was unsharded before any forward; a root's forward replaces it.

    Attributes:
        root: a weak reference to the root.
        memory: unsharded memory that waits to be freed.
        reductions: those in flight.
        hooks: where features plug in; a provisional step calls none.
        post_optim_event: the event that the next root forward's all-gathers wait for, instead of the compute stream.
        order: of the root's forward that runs; None outside.
        notes: of the forward that runs, or of the one whose backward runs.
        awaits_backward: the root's forward ran with gradients, and its backward has not begun yet.
        finishes: whether the running backward is the last of its step, where a feature decides it (otherwise the
            root's settings do). False: it leaves its gradients.
        recomputed: units whose forward a checkpoint recomputed in this backward, and which were not resharded since.
        end: the callback for the end of the running backward; None if no backward runs. Only autograd's engine holds a
            strong reference, so this one is dead if backward raised.
    """

    def __init__(
        self, units: Sequence[Unit], device: torch.device, is_provisional: bool, reductions: InFlight | None = None
    ):
        self.root: ref[Unit] = ref(units[0])
        self._below = [ref(unit) for unit in units[1:]]
        self.memory = ReleasedMemory(streams_for(device))
        self.reductions = InFlight() if reductions is None else reductions
        self.hooks = Hooks()
        self.is_provisional = is_provisional
        self.post_optim_event: torch.Event | None = None
        self.order: Pass | None = None
        self.notes: dict[str, Any] = {}
        self.awaits_backward = False
        self.finishes: bool | None = None
        self.recomputed: list[ref[Unit]] = []
        self.end: ref[Callable[[], None]] | None = None

    @property
    def units(self) -> list[Unit]:
        """The units that are still alive, root first."""
        return [unit for weak in (self.root, *self._below) if (unit := weak()) is not None]

    @property
    def is_last_backward(self) -> bool:
        """Whether this backward is the last of a step."""
        if self.finishes is not None:
            return self.finishes
        root = self.root()
        return root is None or root.settings.is_last_backward

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward starts: what has changed since the last one is looked up once, here."""
        root = self.units[0]
        follow_listeners()
        emit("root_pre_forward", root.fqn)
        has_raised = root.state.stage is Stage.FORWARD
        for unit in self.units:
            if unit.state.stage is Stage.FORWARD:
                if unit.state.calls and unit is not root and not is_running(unit, 1):
                    unit.state.calls.clear()
                unit.complete_forward()
            unit.begin_step(self.awaits_backward, has_raised)
        self.order = Pass()
        self.notes = self.order.notes
        self.follow_compute(self.post_optim_event)
        self.post_optim_event = None

    def follow_compute(self, event: torch.Event | None = None) -> None:
        """Let all-gathers start only after `event`, or after all work enqueued on the compute stream so far (which may
        have changed the shards)."""
        streams = self.memory.streams
        event = event or streams.record()
        with streams.gathering():
            streams.wait(event)

    def end_forward(self) -> None:
        """The root's forward is over; from now on only the backward hooks keep its pass alive."""
        for unit in self.units:
            if unit.state.stage is Stage.FORWARD:
                unit.complete_forward()
        self.order, self.notes = None, {}
        for hook in self.hooks.after_forward:
            hook()
        if not torch.is_grad_enabled():
            self._wait_for_host_memory()  # before the all-gather stream has to wait for compute
        else:  # an evaluation between a forward and its backward changes nothing
            self.awaits_backward = not backward_is_running()
        self.memory.free_all()  # the next all-gather may be far away

    def _wait_for_host_memory(self) -> None:
        """Let the host wait until shards that are offloaded have been copied from its memory: it may change them next,
        and no order of streams applies to that. (After a backward it has waited for gradients.)"""
        groups = (group for unit in self.units for group in unit.groups)
        if any(group.params[0].plan.home != group.roles.device for group in groups):
            with self.memory.streams.gathering():
                copied = self.memory.streams.record()
            if copied is not None:
                copied.synchronize()

    def check_backward_ended(self) -> None:
        """Called before a forward with an `end`. Raises if the last backward raised, and `reset` was not called."""
        if not backward_is_running():
            _raise_unfinished("forward")

    # --- backward ----------------------------------------------------------------------------------------------------

    def expect_end_of_backward(self) -> None:
        """Called from within a backward pass: `end_backward` will run at its end.

        Raises:
            OrderError: the last backward raised, and `reset_iter_state` was not called.
            UnsupportedError: backward runs under compiled autograd, which never runs callbacks at the end.
        """
        if self.end is not None:
            if self.end() is None:
                _raise_unfinished("backward")
            return
        if torch.compiler.is_compiling():
            _refuse_compiled_autograd()
        end = self.end_backward
        self.end = ref(end)
        self.awaits_backward = False
        units = self.units
        for hook in self.hooks.backward_begins:
            hook()
        most = 1
        for unit in units:
            unit.state.settings = unit.in_backward()
            most = max(most, unit.settings.max_input_buffers)
        self.reductions.limit(self, most)
        queue_backward_callback(end)

    def end_backward(self) -> None:
        """The backward pass is over: finish all units. The last backward of a step also waits for all reductions."""
        with profiler_range("FSDP::root_post_backward_callback"):
            self.recomputed = []
            root = self.units[0]
            self.finish_units()
            if self.is_last_backward:
                for hook in self.hooks.before_wait:
                    hook()
                self.finish_reductions()
            for hook in self.hooks.after_backward:
                hook()
            emit("root_post_backward", root.fqn)
            self.end = None  # the last: after an error above a forward must not go on

    def finish_units(self) -> None:
        """Reduce and reshard what is left in all units."""
        for hook in self.hooks.before_last_reductions:
            hook()
        is_last = self.is_last_backward
        for unit in self.units:
            finish_backward(unit, is_last)

    def finish_reductions(self) -> None:
        """Complete all sharded gradients, and free released storage."""
        with outside_transforms():
            self.reductions.finish_all()
            self.memory.free_all()

    # --- after an error ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for reductions, discard their results, and forget the iteration, in all units; a hook may refuse."""
        for hook in self.hooks.on_reset:
            hook()
        self.reductions.abandon_all()
        self.order, self.notes, self.end, self.recomputed = None, {}, None, []
        self.finishes, self.awaits_backward = None, False
        for unit in self.units:
            unit.reset()


def _raise_unfinished(what: str) -> NoReturn:
    raise OrderError(
        f"{what} was called, but the last backward has not finished; did it raise? Call reset_iter_state() on the "
        "root, on every rank, before the next iteration."
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled_autograd() -> None:
    raise UnsupportedError(
        "backward runs under compiled autograd, which does not call back at its end, so that gradients would stay "
        "unreduced. Turn it off (compiled_autograd in the configuration of Dynamo); torch.compile of the model or of "
        "its blocks is fine."
    )
