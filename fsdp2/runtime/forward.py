"""A unit in forward: the hooks of its modules. Layer: runtime, top.

::

    pre_forward    unshard, wait, prefetch, cast inputs, add the node that ends the unit's backward
    post_forward   cast outputs, hook their backward, reshard

Both are plain functions that find the unit through the module, so the hooks of a copied module use the copied unit.
Under transforms of `torch.func`, only changes of inputs and outputs run within the transforms.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp2._torch import next_node_number, outside_transforms, profiler_is_on, running_backward
from fsdp2.events import emit, profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.runtime.autograd import cast_floating, on_backward_begin, on_backward_end
from fsdp2.runtime.backward import alive, conversions_of, post_backward, pre_backward
from fsdp2.runtime.root import become_root
from fsdp2.runtime.state import Stage, is_running
from fsdp2.runtime.step import Step, raise_unfinished
from fsdp2.runtime.tree import map_tensors
from fsdp2.runtime.unit import GATHERED, Unit, has_forward

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def attach(module: nn.Module, unit: Unit) -> None:
    """Register the hooks that drive `unit` on the forward of `module`."""
    module.__dict__["_fsdp2_unit"] = unit
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)  # also if the forward raises


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pre_forward(module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """The forward pre-hook of a sharded module. For a call nested in another call of the unit, or a recomputation in
    the unit's own backward, it only makes sure that the parameters are available."""
    unit: Unit = module.__dict__["_fsdp2_unit"]
    state, step = unit.state, unit.step
    if state.calls and not is_running(unit, 2):
        state.calls.clear()
    state.calls.append(sys.exception())
    is_recomputation = state.stage is Stage.BACKWARD
    is_new = not is_recomputation and len(state.calls) == 1
    if step is None or step.is_provisional:
        with outside_transforms():
            step = become_root(unit)
    with profiler_range("FSDP::pre_forward", unit.fqn) if profiler_is_on() else NOTHING:
        if step.end is not None and running_backward() < 0:
            raise_unfinished("forward")
        if is_new and step.root() is unit:
            args, kwargs = _begin_root(unit, step, args, kwargs)
        is_first = is_new and (state.stage is not Stage.FORWARD or len(unit.members) == 1)
        with outside_transforms():
            if step.order is None:  # outside of the root's forward
                if is_new and running_backward() < 0:
                    unit.drop_stale()
                step.follow_compute()
            if is_first:
                _begin(unit, step)
            unit.unshard()
            unit.wait_for_unshard()
            if (unit.forward_prefetch or step.hooks.unit_started) and not is_recomputation and unit.in_order:
                for hook in step.hooks.unit_started:
                    hook(unit)
                for other in alive(unit.forward_prefetch) if running_backward() < 0 else ():
                    with profiler_range("FSDP::forward_prefetch for", other.fqn):
                        other.unshard(prefetching=True)
        policy = unit.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(policy.param_dtype, (args, kwargs), "FSDP::cast_forward_inputs")
        if is_first:
            state.first_node = next_node_number()
            can_see_end = len(unit.members) == 1 or all(map(has_forward, unit.modules))
            if unit.groups and torch.is_grad_enabled() and can_see_end:
                end, again = partial(post_backward, unit), partial(pre_backward, unit, None, None, None)
                args, kwargs, state.sees_end = on_backward_end(end, again, args, kwargs)
        return args, kwargs


def _begin_root(unit: Unit, step: Step, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """The root's forward starts. Moves its inputs to the accelerator."""
    with profiler_range("FSDP::root_pre_forward"):
        with outside_transforms():
            step.begin_forward()
        for hook in step.hooks.before_forward:
            hook(args, kwargs)
        if unit.device.type != "cpu":
            with profiler_range("FSDP::inputs_to_device"):
                args, kwargs = map_tensors(lambda tensor: tensor.to(unit.device, non_blocking=True), (args, kwargs))
        return args, kwargs


def _begin(unit: Unit, step: Step) -> None:
    """The first module of the unit runs. Reshards the units that a checkpoint recomputed, except the last one, and
    frees all released memory, so that at most two units are unsharded."""
    if step.recomputed and unit.in_order:
        for other in alive(step.recomputed[:-1]):
            if other.state.stage is Stage.IDLE:
                other.reshard_after_forward()
        del step.recomputed[:-1]
        step.memory.free_all()
    emit("pre_forward", unit.fqn)
    state = unit.state
    state.stage = Stage.FORWARD
    if len(unit.members) > 1:
        state.to_run = set(map(id, unit.modules))
    state.was_whole = False
    for group in unit.groups:
        state.was_whole = state.was_whole or group.phase in GATHERED
    if state.was_whole:
        for group in (*unit.groups, *unit.borrowed):
            group.adopt_changes()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def post_forward(module: nn.Module, args: _Args, output: Any) -> Any:
    """The forward hook of a sharded module. After a forward that raised, the unit stays in `Stage.FORWARD` until the
    next forward begins or the root's ends, which clean up."""
    unit: Unit = module.__dict__["_fsdp2_unit"]
    step, state = unit.step, unit.state
    if sys.exception() is not (state.calls.pop() if state.calls else None):  # it raised
        if step is not None and not state.calls and step.root() is unit:
            step.order = None
        return output
    assert step is not None
    with profiler_range("FSDP::post_forward", unit.fqn) if profiler_is_on() else NOTHING:
        if unit.policy.output_dtype is not None:
            output = cast_floating(unit.policy.output_dtype, output, "FSDP::cast_forward_outputs")
        if state.stage is Stage.BACKWARD:  # recomputation
            for group in unit.groups:
                group.gradients.keep_hooks_last()
            return output
        if torch.is_grad_enabled():
            output = _hook_backward(unit, step, output)
        state.to_run.discard(id(module))
        if state.calls:
            return output
        with outside_transforms():
            if not state.to_run:
                unit.end_forward(output)
            if step.root() is unit:
                step.end_forward()
            elif step.order is None and running_backward() < 0:
                for hook in step.hooks.after_forward:
                    hook()
        return output


def _hook_backward(unit: Unit, step: Step, output: Any) -> Any:
    """Run `pre_backward` before the backward of `output`. A forward outside of the root's (a unit called alone, a
    recomputation) takes no part in the order: the unit that ran before it is unrelated to its backward."""
    notes, before = None, None
    if unit.groups if unit.role is None else unit.role.in_order:
        notes = step.notes
        before = None if step.order is None else step.order.record(unit)
    begin = partial(pre_backward, unit, notes, before, list(map(conversions_of, unit.groups)))
    return on_backward_begin(begin, output, unit.state.first_node)
