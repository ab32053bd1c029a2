"""`Step`: what the units below one root share: their order, memory, reductions. Layer: runtime, top.

One step of a root with units 0, 1, 2 that reshard after forward (time runs to the right; ``A`` all-gather, ``C``
compute, ``R`` reduction; entries in one column may overlap)::

    forward   compute stream       C0  C1  C2
              gather stream    A0  A1  A2            A1 is issued before C0 ends: the host is ahead
    backward  compute stream       C2  C1  C0
              gather stream    A2  A1  A0            A1 is issued by unit 2, before its compute
              reduce stream            R2  R1  R0    R2 starts at unit 2's last gradient

Backward prefetches in reverse forward order: each forward of the root has a `Pass`, and the backward hook of a unit
remembers the unit that ran before it. So the order is right even if a unit ran twice, two forwards share one backward,
or a forward had no backward.

After a backward that raised, the next forward or backward is an error, until `reset`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch

from fsdp2._torch import outside_transforms, queue_backward_callback, running_backward
from fsdp2.errors import OrderError, UnsupportedError
from fsdp2.events import emit, follow_listeners, profiler_range
from fsdp2.runtime.backward import finish_backward
from fsdp2.runtime.hooks import Hooks
from fsdp2.runtime.reduction import InFlight
from fsdp2.runtime.state import Stage, is_running
from fsdp2.runtime.storage import ReleasedMemory
from fsdp2.runtime.streams import streams_for

Unit: TypeAlias = Any  # `runtime.unit.Unit`: that module is above this one


class Pass:
    """The last two units that one forward has run."""

    def __init__(self) -> None:
        self._last: Unit | None = None
        self._before: Unit | None = None

    def record(self, unit: Unit) -> Unit | None:
        """`unit` has run. Returns the unit that ran just before it; None for the first. Several calls in a row with the
        same unit count once, because the modules of a list finish one by one."""
        if unit is not self._last:
            self._last, self._before = unit, self._last
        return self._before


class Step:
    """The shared state of one root and the units below it.

    Args:
        units: the root first, then the others in the order of the module tree. Held weakly: modules own their units.
        is_provisional: created for a unit that was unsharded before any forward; the root's forward replaces it.

    Attributes:
        root: a weak reference to the root.
        memory: unsharded memory that waits to be freed.
        reductions: the reductions in flight; several roots may share them.
        hooks: where features plug in; a provisional step calls none.
        post_optim_event: what all-gathers of the next root forward wait for, instead of the compute stream.
        order: the units that the root's running forward has run; None outside of it.
        notes: what features store, by name, about the running forward, or the forward whose backward is running.
        awaits_backward: the root's forward ran with gradients, and its backward has not begun yet.
        is_last: the running or last backward is the last one of its step.
        recomputed: units that a checkpoint recomputed in this backward and that were not resharded since.
        end: the callback for the end of the running backward; None if none is running. Only autograd's engine holds a
            strong reference, so this one is dead if backward raised.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, is_provisional: bool):
        self.root: ref[Unit] = ref(units[0])
        self._units = list(map(ref, units))
        self.memory = ReleasedMemory(streams_for(device))
        self.reductions = InFlight()
        self.hooks = Hooks()
        self.is_provisional = is_provisional
        self.post_optim_event: torch.Event | None = None
        self.order: Pass | None = None
        self.notes: dict[str, Any] = {}
        self.awaits_backward = False
        self.is_last = True
        self.recomputed: list[ref[Unit]] = []
        self.end: ref[Callable[[], None]] | None = None

    @property
    def units(self) -> list[Unit]:
        """The units that are still alive, root first."""
        return list(filter(None, map(ref.__call__, self._units)))

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward starts. This is the only place that checks what has changed since the last one."""
        root, *_ = units = self.units
        follow_listeners()
        emit("root_pre_forward", root.fqn)
        has_raised = root.state.stage is Stage.FORWARD  # unused prefetches are stale
        for unit in units:
            if unit.state.stage is Stage.FORWARD and unit is not root and not is_running(unit):
                unit.state.calls.clear()
                unit.end_forward()
            for group in unit.groups:
                if group.roles.shard_axis is None and not self.awaits_backward:
                    group.changes.forget_use()
            if has_raised:
                unit.reshard()
            unit.drop_stale()
        self.order, self.notes = Pass(), {}
        self.follow_compute(self.post_optim_event)
        self.post_optim_event = None

    def follow_compute(self, event: torch.Event | None = None) -> None:
        """Let all-gathers start only after `event`, or else after all work enqueued on the compute stream so far, which
        may change the shards."""
        streams = self.memory.streams
        event = event or streams.record()
        with streams.gathering():
            streams.wait(event)

    def end_forward(self) -> None:
        """The root's forward is over; from now on only the backward hooks keep its order alive. A unit whose forward
        contains the call of the root is still running."""
        for unit in self.units:
            if unit.state.stage is Stage.FORWARD and not unit.state.calls:
                unit.end_forward()
        self.order, self.notes = None, {}
        for hook in self.hooks.after_forward:
            hook()
        if torch.is_grad_enabled():  # an evaluation between a forward and its backward changes nothing
            self.awaits_backward = running_backward() < 0
        self.memory.free_all()  # the next all-gather may be far away

    # --- backward ----------------------------------------------------------------------------------------------------

    def expect_end_of_backward(self) -> None:
        """Called in a backward pass: let `end_backward` run at its end. Raises `OrderError` after a backward that
        raised, and `UnsupportedError` under compiled autograd, which runs no callbacks at the end."""
        if self.end is not None:
            if self.end() is None:
                raise_unfinished("backward")
            return
        if torch.compiler.is_compiling():
            _refuse_compiled_autograd()
        end = self.end_backward
        self.end = ref(end)
        self.awaits_backward = False
        self._choose_settings()
        queue_backward_callback(end)

    def _choose_settings(self) -> None:
        """Choose the settings of all units for the backward that begins."""
        units = self.units
        self.is_last = units[0].settings.is_last_backward
        for unit in units:
            settings = unit.settings
            if settings.zero is not None or settings.when_reduced:
                settings = settings.in_backward(self.is_last)
            unit.state.settings = settings
        self.reductions.limit(self, max([unit.settings.max_input_buffers for unit in units]))
        for hook in self.hooks.settings_chosen:
            hook()

    def end_backward(self) -> None:
        """The backward pass is over: finish all units. The last backward of a step also waits for all reductions."""
        with profiler_range("FSDP::root_post_backward_callback"):
            self.recomputed = []
            self.finish_units()
            if self.is_last:
                for hook in self.hooks.before_wait:
                    hook()
                self.finish_reductions()
            for hook in self.hooks.after_backward:
                hook()
            emit("root_post_backward", self.units[0].fqn)
            self.end = None  # last: after an error above, the next forward must raise

    def finish_units(self) -> None:
        """Reduce and reshard what is left in all units."""
        if self.end is None:  # no backward runs
            self._choose_settings()
        for hook in self.hooks.before_last_reductions:
            hook()
        with outside_transforms():
            for unit in self.units:
                finish_backward(unit, self.is_last)

    def finish_reductions(self) -> None:
        """Complete all sharded gradients, and free released storage."""
        with outside_transforms():
            self.reductions.finish_all()
            self.memory.free_all()

    # --- after an error ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for reductions, discard their results, and reset all units. A hook may raise instead."""
        for hook in self.hooks.on_reset:
            hook()
        self.reductions.abandon_all()
        self.order, self.notes, self.end, self.recomputed = None, {}, None, []
        self.awaits_backward = False
        for unit in self.units:
            unit.reset()


def raise_unfinished(what: str) -> NoReturn:
    """Raise, because a forward or backward begins although the last backward raised."""
    raise OrderError(
        f"{what} was called, but the last backward has not finished; did it raise? Call reset_iter_state() on the "
        "root, on every rank, before the next iteration."
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled_autograd() -> None:
    raise UnsupportedError(
        "backward runs under compiled autograd, which runs no callbacks at its end, so gradients would stay unreduced. "
        "Set torch._dynamo.config.compiled_autograd to False; torch.compile of the model or of its blocks is fine."
    )
