"""A unit in backward: what its hooks do. Layer: runtime, below the step.

The hook on an output's gradient, that on the last gradient of a group, the end of the unit's backward, and of all.
"""

from typing import Any, TypeAlias
from weakref import ref

from fsdp2._torch import profiler_is_on
from fsdp2.errors import OrderError
from fsdp2.events import emit, profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.runtime.autograd import backward_is_whole
from fsdp2.runtime.state import Stage

Unit: TypeAlias = Any  # `runtime.unit.Unit`: that module is above this one
Pass: TypeAlias = Any  # `runtime.step.Pass`


def pre_backward(unit: Unit, order: Pass | None, position: int, conversions: int, *_grad: object) -> None:
    """Hook on the outputs' gradients. The unit ran at `position` of `order`; None if it has no place in the order.

    Raises:
        OrderError: parameters were converted since the forward, when `unit.conversions()` was `conversions`; or they
            were stepped in this backward.
    """
    with profiler_range("FSDP::pre_backward", unit.fqn) if profiler_is_on() else NOTHING:
        step, state = unit.step, unit.state
        if not (state.sees_end and backward_is_whole()):
            for hook in step.hooks.reached_in_part:
                hook(unit)
        if step.end is None or step.end() is None:
            step.expect_end_of_backward()
        if order is not None:
            step.notes = order.notes
        if state.stage is Stage.BACKWARD:
            if unit.role is not None and unit.role.in_order and unit.settings.unshard_in_backward:
                unit.unshard()  # a second forward in this backward may need other groups than the first
            return
        if state.settings.when_reduced:
            _check_not_stepped(unit)
        emit("pre_backward", unit.fqn)
        state.stage = Stage.BACKWARD
        state.to_run = set()
        for group in unit.groups:
            group.adopt_changes()
            group.gradients.begin_backward()
        if unit.settings.unshard_in_backward:
            unit.unshard()
            if unit.conversions() != conversions:
                raise OrderError(
                    f"unit '{unit.name}': parameters were converted between forward and backward. Run the backward "
                    "before to(dtype), or the forward again after it. After this error call model.reset_iter_state()."
                )
            unit.wait_for_unshard()
        if order is not None:
            _prefetch(unit, order, position)


def _prefetch(unit: Unit, order: Pass, position: int) -> None:
    """The explicit list, otherwise the unit that ran just before this one in forward."""
    if unit.backward_prefetch:
        targets = unit.alive(unit.backward_prefetch)
    else:
        before = order.before(position)
        targets = [] if before is None else [before]
    for target in targets:
        if target.settings.unshard_in_backward:
            with profiler_range("FSDP::backward_prefetch for", target.fqn) if profiler_is_on() else NOTHING:
                target.unshard(prefetching=True)


def _check_not_stepped(unit: Unit) -> None:
    """Before parameters are gathered for backward: raise if an optimizer has stepped them in this backward."""
    if any(group.gradients.were_taken for group in unit.groups):
        raise OrderError(
            f"unit '{unit.name}': backward needs its parameters again, but step_in_backward stepped them when their "
            "gradients were complete. This happens to a unit that is used in several reentrant checkpoints: use "
            "use_reentrant=False, or step after backward. After this error call model.reset_iter_state()."
        )


def pre_backward_again(unit: Unit, *_grad: object) -> None:
    """A backward through this unit's own backward reaches the unit again."""
    pre_backward(unit, None, -1, unit.conversions())


def reached(weak: "ref[Unit]") -> None:
    """A gradient has arrived, by no output of the unit: of a tensor that a module has kept, or of a loss outside of the
    forward that reads a parameter. The end of backward reduces it."""
    unit = weak()
    if unit is not None:
        unit.ready_step().expect_end_of_backward()


def gradients_ready(weak: "ref[Unit]", index: int) -> None:
    """All trainable parameters of a group have a gradient, so their reduction can start before the unit's backward
    ends. If other ranks may lack some gradients, all ranks start it at the end of backward instead. Parameters that are
    used as they are cannot be stepped before the unit's backward ends."""
    unit = weak()
    if unit is None:
        return
    if unit.step is None or unit.step.end is None or unit.step.end() is None:
        reached(weak)
    settings, group = unit.state.settings, unit.groups[index]
    steps_what_is_used = settings.when_reduced and group.roles.shard_axis is None
    waits = settings.reduce_unused or unit.role is not None or steps_what_is_used
    if settings.requires_gradient_sync and not waits:
        unit.reduce(group, settings)


def post_backward(unit: Unit) -> None:
    """The unit's backward has ended, at least for now: reshard, and reduce the remaining gradients."""
    emit("post_backward", unit.fqn)
    unit.state.stage = Stage.DONE
    settings = unit.state.settings
    if settings.reshard_after_backward:
        with profiler_range("FSDP::post_backward_reshard", unit.fqn) if profiler_is_on() else NOTHING:
            unit.reshard(within_step=not settings.ends_step)
    if settings.requires_gradient_sync and not settings.reduce_unused and unit.role is None:
        for group in reversed(unit.groups):
            unit.reduce(group, settings)


def finish_backward(unit: Unit, is_last: bool) -> None:
    """The backward pass is over: reduce and reshard what is left. Unless it `is_last` of the step, parameters that were
    prefetched but not used stay for the next one."""
    state = unit.state
    if state.stage is Stage.FORWARD and state.calls:
        return  # a backward within its forward, the rest of which needs its parameters
    if unit.step.end is None:  # no backward runs
        state.settings = unit.in_backward()
    settings = state.settings
    if state.stage is Stage.BACKWARD:
        post_backward(unit)
    elif state.stage is Stage.IDLE:
        unit.adopt_changes()  # unsharded by hand, for a loss outside of the forward
    if settings.reshard_after_backward and is_last:
        unit.reshard(within_step=not settings.ends_step)
    if settings.requires_gradient_sync:
        for group in reversed(unit.groups):
            unit.reduce(group, settings, at_end=True)
    for group in unit.groups:
        group.gradients.end_backward()
    state.stage = Stage.IDLE
    state.to_run = set()
