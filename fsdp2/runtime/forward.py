"""A unit in forward: the hooks of its modules. Layer: runtime, top.

::

    pre_forward    unshard, wait, prefetch, cast inputs; the end of backward is put into the graph
    post_forward   cast outputs, hook their backward, reshard

Both are plain functions that find the unit through the module, so the hooks of a copied module use the copied unit.
"""

import sys
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from fsdp2._torch import next_node_number, outside_transforms, profiler_is_on, running_backward
from fsdp2.events import emit, profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.runtime.autograd import cast_floating, on_backward_begin, on_backward_end
from fsdp2.runtime.backward import post_backward, pre_backward, pre_backward_again
from fsdp2.runtime.root import become_root
from fsdp2.runtime.state import Stage, State, is_running
from fsdp2.runtime.step import Pass, Step
from fsdp2.runtime.tree import map_tensors
from fsdp2.runtime.unit import GATHERED, Unit, has_forward

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def attach(module: nn.Module, unit: Unit) -> None:
    """Let the forward of `module` drive `unit`."""
    module.__dict__["_fsdp2_unit"] = unit
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)  # also if the forward raises


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pre_forward(module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """The forward pre-hook of a sharded module."""
    unit: Unit = module.__dict__["_fsdp2_unit"]
    state = unit.state
    if state.calls and not is_running(unit, 2):
        state.calls.clear()
    is_nested = bool(state.calls)
    state.calls.append(sys.exception())
    step = unit.step
    if step is None or step.is_provisional:
        with outside_transforms():
            step = become_root(unit)
    with profiler_range("FSDP::pre_forward", unit.fqn) if profiler_is_on() else NOTHING:
        if step.end is not None:
            step.check_backward_ended()
        is_recomputation = state.stage is Stage.BACKWARD
        is_new = not is_recomputation and not is_nested
        if is_new and step.root() is unit:
            args, kwargs = _begin_root(unit, step, args, kwargs)
        elif step.order is None:
            if is_new and running_backward() < 0:
                unit.drop_stale()
            step.follow_compute()
        is_first = is_new and (not state.to_run or len(unit.members) == 1)
        if is_first:
            _begin(unit, step, state, module)
        unit.unshard()
        unit.wait_for_unshard()
        if (unit.forward_prefetch or step.hooks.unit_started) and not is_recomputation and unit.in_order:
            _prefetch(unit, step)
        policy = unit.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(policy.param_dtype, (args, kwargs), "FSDP::cast_forward_inputs")
        if is_first:
            state.first_node = next_node_number()
            is_whole = len(unit.members) == 1 or all(map(has_forward, unit.modules))  # the end of backward can be seen
            if unit.groups and torch.is_grad_enabled() and is_whole:
                end, again = partial(post_backward, unit), partial(pre_backward_again, unit)
                args, kwargs, state.sees_end = on_backward_end(end, again, args, kwargs)
        return args, kwargs


def _begin_root(unit: Unit, step: Step, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """The root's forward starts. Moves its inputs to the accelerator."""
    with profiler_range("FSDP::root_pre_forward"):
        step.begin_forward()
        for hook in step.hooks.before_forward:
            hook(args, kwargs)
        if unit.device.type == "cpu":
            return args, kwargs
        with profiler_range("FSDP::inputs_to_device"):
            moved = map_tensors(lambda tensor: tensor.to(unit.device, non_blocking=True), (args, kwargs))
        return moved[0], moved[1]


def _begin(unit: Unit, step: Step, state: State, module: nn.Module) -> None:
    """`module` is the first of the unit to run. Of the units that a checkpoint recomputed before, all but the last are
    resharded, and all other memory is freed, so that the bound of two units holds."""
    if step.recomputed and unit.in_order:
        for other in [weak() for weak in step.recomputed[:-1]]:
            if other is not None and other.state.stage is Stage.IDLE:
                other.reshard_after_forward()
        del step.recomputed[:-1]
        step.memory.free_all()
    emit("pre_forward", unit.fqn)
    state.stage = Stage.FORWARD
    state.to_run = {id(module)} if len(unit.members) == 1 else set(map(id, unit.modules))
    state.was_whole = False
    for group in unit.groups:
        if group.phase in GATHERED:
            state.was_whole = True
    if state.was_whole:
        unit.adopt_changes()


def _prefetch(unit: Unit, step: Step) -> None:
    for hook in step.hooks.unit_started:
        hook(unit)
    for other in unit.alive(unit.forward_prefetch):
        with profiler_range("FSDP::forward_prefetch for", other.fqn):
            other.unshard(prefetching=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def post_forward(module: nn.Module, args: _Args, output: Any) -> Any:
    """The forward hook of a sharded module. After a forward that raised, another exception is being handled than when
    it began."""
    unit: Unit = module.__dict__["_fsdp2_unit"]
    step, state = unit.step, unit.state
    before = state.calls.pop() if state.calls else None
    if sys.exception() is not before:
        abandon_forward(unit)
        return output
    assert step is not None
    with profiler_range("FSDP::post_forward", unit.fqn) if profiler_is_on() else NOTHING:
        if unit.policy.output_dtype is not None:
            output = cast_floating(unit.policy.output_dtype, output, "FSDP::cast_forward_outputs")
        if state.stage is Stage.BACKWARD:  # recomputation
            for group in unit.groups:
                group.gradients.keep_hooks_last()
            return output
        if len(unit.members) > 1:
            state.to_run.discard(id(module))
        elif state.to_run:
            state.to_run.clear()  # `module` may be a shallow copy
        if state.calls:
            return _hook_backward(unit, step, output)
        is_over = not state.to_run
        if is_over:
            emit("post_forward", unit.fqn)
        output = _hook_backward(unit, step, output)
        if is_over:
            _end(unit, step, output)
        if step.root() is unit:
            step.end_forward()
        elif step.order is None and running_backward() < 0:
            for hook in step.hooks.after_forward_alone:
                hook()
        return output


def _end(unit: Unit, step: Step, output: Any) -> None:
    """All modules of the unit have run."""
    unit.state.stage = Stage.IDLE
    if running_backward() < 0:
        unit.reshard_after_forward(output)
        return
    if unit.in_order:
        step.recomputed.append(ref(unit))
    step.expect_end_of_backward()


def abandon_forward(unit: Unit) -> None:
    """A forward raised. What it leaves is cleared when the next one begins, or the root's ends: the unit's stage says
    so until then."""
    step = unit.step
    if step is not None and not unit.state.calls and step.root() is unit:
        step.order = None


def _hook_backward(unit: Unit, step: Step, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    order: Pass | None = None
    position = -1
    if unit.groups if unit.role is None else unit.role.in_order:
        # A forward outside of the root's (a unit called alone, a recomputation) has a pass of its own: what ran before
        # it is unrelated to its backward.
        order = Pass(step.notes) if step.order is None else step.order
        position = order.record(unit)
    begin = partial(pre_backward, unit, order, position, unit.conversions())
    return on_backward_begin(begin, output, unit.state.first_node)
