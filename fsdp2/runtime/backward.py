"""A unit in backward: what its hooks do. Layer: runtime, below the step.

::

    pre_backward       hook on the outputs' gradients      unshard, wait, prefetch
    gradients_ready    hook on a group's last gradient     its reduction starts
    post_backward      end of the unit's backward          reshard, reduce the remaining gradients
    finish_backward    end of the whole backward           the same for what is left
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import ref

from fsdp2._torch import outside_transforms, profiler_is_on
from fsdp2.errors import OrderError
from fsdp2.events import emit, profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.policies import UnitSettings
from fsdp2.runtime.autograd import backward_is_whole
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.state import Stage, Stays

Unit: TypeAlias = Any  # `runtime.unit.Unit`: that module is above this one
# How often a group's unsharded parameters were dropped.
conversions_of: Callable[[Bucket], int] = attrgetter("conversions")


def alive(weak_units: "Sequence[ref[Unit]]") -> list[Unit]:
    """The units of a list that are alive and take part in the order."""
    return [unit for weak in weak_units if (unit := weak()) is not None and unit.in_order]


def pre_backward(
    unit: Unit, notes: dict[str, Any] | None, before: Unit | None, conversions: list[int] | None, *_grad: object
) -> None:
    """Hook on the outputs' gradients.

    Args:
        notes: `Step.notes` of the forward; None if the unit takes no part in the order.
        before: the unit that ran just before this one in forward; prefetched if there is no explicit list.
        conversions: `conversions` of its groups in forward; None in a backward through the unit's own backward.

    Raises:
        OrderError: parameters were converted since the forward, or were already stepped in this backward.
    """
    with profiler_range("FSDP::pre_backward", unit.fqn) if profiler_is_on() else NOTHING, outside_transforms():
        step, state = unit.step, unit.state
        if not (state.sees_end and backward_is_whole()):
            for hook in step.hooks.reached_in_part:
                hook(unit)
        if step.end is None or step.end() is None:
            step.expect_end_of_backward()
        if notes is not None:
            step.notes = notes
        if state.stage is Stage.BACKWARD:
            if unit.role is not None and unit.role.in_order and unit.settings.unshard_in_backward:
                unit.unshard()  # a second forward in this backward may need other groups than the first
            return
        if state.settings.when_reduced and any(group.gradients.were_taken for group in unit.groups):
            raise OrderError(
                f"unit '{unit.name}': backward needs its parameters again, but step_in_backward stepped them when "
                "their gradients were complete. This happens to a unit that is used in several reentrant checkpoints: "
                "use use_reentrant=False, or step after backward. After this error call model.reset_iter_state()."
            )
        emit("pre_backward", unit.fqn)
        state.stage = Stage.BACKWARD
        for group in unit.groups:
            if group.phase is Phase.UNSHARDED:
                group.adopt_changes()
            group.gradients.begin_backward()
        if unit.settings.unshard_in_backward:
            unit.unshard()
            if conversions not in (None, list(map(conversions_of, unit.groups))):
                raise OrderError(
                    f"unit '{unit.name}': parameters were converted between forward and backward. Run the backward "
                    "before to(dtype), or the forward again after it. After this error call model.reset_iter_state()."
                )
            unit.wait_for_unshard()
        if notes is not None:
            for target in alive(unit.backward_prefetch) if unit.backward_prefetch else (before,):
                if target is not None and target.settings.unshard_in_backward:
                    with profiler_range("FSDP::backward_prefetch for", target.fqn) if profiler_is_on() else NOTHING:
                        target.unshard(prefetching=True)


def reached(weak: "ref[Unit]") -> None:
    """A gradient has arrived that did not pass through an output of the unit: through a tensor that a module has kept,
    or from a loss outside of the forward that reads a parameter. It is reduced at the end of backward."""
    unit = weak()
    if unit is not None:
        unit.ready_step().expect_end_of_backward()


def gradients_ready(weak: "ref[Unit]", index: int) -> None:
    """All trainable parameters of a group have a gradient, so their reduction can start before the unit's backward
    ends. If other ranks may lack some gradients, all ranks start it at the end of backward instead. A reduction that
    steps parameters used in place waits for the end of the unit's backward. (`pre_backward` or `reached` ran first.)"""
    unit = weak()
    if unit is None:
        return
    settings, group = unit.state.settings, unit.groups[index]
    steps_what_is_used = settings.when_reduced and group.roles.shard_axis is None
    waits = settings.reduce_unused or unit.role is not None or steps_what_is_used
    if settings.requires_gradient_sync and not waits:
        with outside_transforms():
            _reduce(unit, group, settings)


def _reduce(unit: Unit, group: Bucket, settings: UnitSettings, at_end: bool = False) -> None:
    """Reduce the gradients of `group` that exist; at the end of backward also those that `settings` ask for."""
    in_flight = unit.step.reductions
    if group.roles.replicate_group is not None and settings.requires_all_reduce:
        in_flight.finish_partials()
    if unit.role is not None:
        settings = unit.role.reduction_settings(group, settings)
    if reductions := group.gradients.take(settings, at_end, unit.step.memory.streams):
        in_flight.start(reductions)


def post_backward(unit: Unit) -> None:
    """The unit's backward has ended, perhaps to be entered again: reshard, and reduce the remaining gradients."""
    emit("post_backward", unit.fqn)
    unit.state.stage = Stage.DONE
    settings = unit.state.settings
    with outside_transforms():
        if settings.reshard_after_backward:
            with profiler_range("FSDP::post_backward_reshard", unit.fqn) if profiler_is_on() else NOTHING:
                unit.reshard(Stays.NOTHING if settings.ends_step else Stays.PART)
        if settings.requires_gradient_sync and not settings.reduce_unused and unit.role is None:
            for group in reversed(unit.groups):
                _reduce(unit, group, settings)


def finish_backward(unit: Unit, is_last: bool) -> None:
    """The backward pass is over: reduce and reshard what is left. If it is not the last of the step, parameters that
    were prefetched but not used stay unsharded for the next one."""
    state, settings = unit.state, unit.state.settings
    if state.stage is Stage.FORWARD and state.calls:
        return  # a backward within the unit's forward, the rest of which needs the parameters
    if state.stage is Stage.BACKWARD:
        post_backward(unit)
    elif state.stage is Stage.IDLE:  # the user may have unsharded it, for a loss outside of the forward
        for group in (*unit.groups, *unit.borrowed):
            group.adopt_changes()
    if settings.reshard_after_backward and is_last:
        unit.reshard(Stays.NOTHING if settings.ends_step else Stays.PART)
    if settings.requires_gradient_sync:
        for group in reversed(unit.groups):
            _reduce(unit, group, settings, at_end=True)
    for group in unit.groups:
        group.gradients.end_backward()
    state.stage = Stage.IDLE
