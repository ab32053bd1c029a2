"""`Unit`: what one `fully_shard` call manages, and its life through forward and backward. Layer: runtime.

::

    IDLE      --pre_forward-->    FORWARD    unshard, wait, prefetch, cast inputs
    FORWARD   --post_forward-->   IDLE       cast outputs, hook their backward, reshard
    IDLE      --pre_backward-->   BACKWARD   unshard, wait, prefetch
    BACKWARD  --post_backward-->  DONE       reshard, reduce what was not
    DONE      --end of backward-> IDLE

A forward inside backward is the recomputation of an activation checkpoint: it finds the parameters unsharded and leaves
them unsharded. So does a forward nested in another forward of the same unit, because the outer one still needs them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from fsdp2._torch import next_node_number, outside_transforms, profiler_is_on, running_backward
from fsdp2.errors import OrderError
from fsdp2.events import emit, profiler_range
from fsdp2.nothing import NOTHING
from fsdp2.policies import MixedPrecisionPolicy, UnitSettings
from fsdp2.runtime.autograd import backward_is_whole, cast_floating, on_backward_begin, on_backward_end
from fsdp2.runtime.calls import is_running, is_within_itself
from fsdp2.runtime.context import Context
from fsdp2.runtime.in_flight import InFlight
from fsdp2.runtime.param_group import ParamGroup, Phase
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.schedule import Pass
from fsdp2.runtime.tree import map_tensors, tensors_within


class Stage(Enum):
    """Where a unit is in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    DONE = "done"  # its backward ran; this backward pass may reach it again


def unit_of(module: nn.Module) -> "Unit | None":
    """The unit that manages `module` itself."""
    unit = module.__dict__.get("_fsdp2_unit")
    return unit if isinstance(unit, Unit) else None


def unit_for(module: object) -> "Unit":
    """The unit of a sharded module."""
    unit: Unit = module.__dict__["_fsdp2_unit"]
    return unit


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; a plain ModuleList cannot."""
    return type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Module.forward)


_units: "WeakSet[Unit]" = WeakSet()
_conversions_of: Callable[[ParamGroup], int] = attrgetter("conversions")


def units_with(params: Iterable[torch.Tensor]) -> "list[Unit]":
    """The units of this process that manage some of these sharded parameters, or parts of them."""
    ids = {id(param) for param in params}
    groups = [(unit, group) for unit in _units for group in unit.groups]
    return [*dict.fromkeys(unit for unit, group in groups if any(id(param.sharded) in ids for param in group.params))]


class Unit:
    """One module, or a list of modules that gather and reduce together.

    Attributes:
        groups: the parameters, one group per mesh and policy; none for a unit without parameters.
        borrowed: groups of other units, which this unit gathers too (tied weights); their owner reduces them.
        fqn: relative to the root once there is one; ``""`` for the root.
        context: shared with the root; None until the first forward or unshard.
        select: returns the groups that `unshard` (True) and `reshard` (False) act on. None: its own and the borrowed.
        in_order: whether it has a place in the order of units, and is prefetched.
        reduces_late: all its reductions wait for the end of the whole backward, and use the settings that this returns
            for a group. None: they start as soon as they can.
        in_flight: the reductions that this unit, as a root, shares with other roots; None if it shares none.
        forward_prefetch, backward_prefetch: explicit lists; weak, since two units may name each other.
        first_node: `next_node_number()` at the beginning of the last forward.
        followers: units to which this one's settings apply too.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        param_lists: Sequence[Sequence[ManagedParameter]],
        device: torch.device,
        policy: MixedPrecisionPolicy,
        settings: UnitSettings,
    ):
        self._modules: list[ref[nn.Module]] = []
        self.groups: list[ParamGroup] = []
        self.borrowed: list[ParamGroup] = []
        self.fqn = ""
        self.context: Context | None = None
        self.device = device
        self.policy = policy
        self.settings = settings
        self.forward_prefetch: list[ref[Unit]] = []
        self.backward_prefetch: list[ref[Unit]] = []
        self.followers: list[Unit] = []
        self.select: Callable[[bool], Sequence[ParamGroup]] | None = None
        self.in_order = True
        self.reduces_late: Callable[[ParamGroup, UnitSettings], UnitSettings] | None = None
        self.in_flight: InFlight | None = None
        self.stage = Stage.IDLE
        self._to_run: set[int] = set()  # modules of this forward that have not ended; empty in every other stage
        self._depth = 0  # of nested forwards
        self._was_whole = False  # unsharded before the forward that runs
        self._sees_end = False  # the last forward had inputs that need gradients
        self.first_node = 0
        _units.add(self)
        self.adopt(modules, param_lists)

    def adopt(self, modules: Sequence[nn.Module], param_lists: Sequence[Sequence[ManagedParameter]]) -> None:
        """Manage these modules and parameters, and no others."""
        self._modules = [ref(module) for module in modules]
        self.groups = []
        for params in param_lists:
            ready = partial(_gradients_ready, ref(self), len(self.groups))
            self.groups.append(ParamGroup(params, ready, partial(_backward_reached, ref(self))))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are still alive."""
        return [module for weak in self._modules if (module := weak()) is not None]

    @property
    def params(self) -> list[ManagedParameter]:
        """The parameters of all groups, without those whose shard is another parameter's."""
        return [param for group in self.groups for param in group.params if param.at_rest is not None]

    def ready_context(self) -> Context:
        """The context; a provisional one for a unit that no root's forward has reached yet. Raises like `refresh`."""
        if self.context is None:
            self.refresh()
            self.context = Context([self], self.device, is_provisional=True)
        return self.context

    def in_backward(self) -> UnitSettings:
        """The settings for this backward."""
        context, settings = self.context or self.ready_context(), self.settings
        if settings.zero is not None or settings.when_reduced:
            settings = settings.in_backward(context.is_last_backward)
        return replace(settings, requires_gradient_sync=False) if context.step.is_manual else settings

    def leave_root(self) -> None:
        """Drop what features of a former root have set."""
        self.select, self.in_order, self.reduces_late = None, True, None

    def _reshard_after_forward(self, output: Any = None) -> None:
        how, for_backward = self.settings.reshard_after_forward, torch.is_grad_enabled()
        if how is None and for_backward and output is not None:  # of a method that turns gradients off itself?
            for_backward = any(tensor.requires_grad for found in tensors_within(output) for tensor in found)
        if how:
            self.reshard(to_smaller=for_backward and how is not True, within_step=for_backward)
        elif how is None and not for_backward and not self._was_whole:
            self.reshard(keep_values=True)
        else:
            for group in self.groups:
                group.changes.check_none()

    def _adopt_changes(self) -> None:
        """Take over what was changed in place, while it was unsharded, outside of forward and backward."""
        for group in (*self.groups, *self.borrowed):
            group.adopt_changes()

    # --- following the modules ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt parameters that were moved, converted or replaced.

        Raises:
            OrderError: parameters are still on the meta device, or not where offload keeps them.
        """
        on_meta = [fqn for group in self.groups for fqn in group.on_meta()]
        if on_meta:
            raise OrderError(
                f"unit '{self.fqn or '(root)'}': parameters are still on the meta device: {on_meta}. Materialise "
                "them first: fsdp2.init.materialize(model), or fsdp2.checkpoint.load(folder, model=model)."
            )
        elsewhere = [each for group in self.groups for each in group.not_at_home()]
        if elsewhere:
            raise OrderError(
                f"unit '{self.fqn or '(root)'}' is offloaded, so its sharded parameters must be on the CPU; these "
                f"are not: {elsewhere}. Move them there: model.to('cpu'); fsdp2.init.materialize(model) puts them "
                "there itself."
            )
        self.refresh_groups()

    def refresh_groups(self) -> None:
        """`refresh` without the checks, for a model that is being materialised or loaded."""
        for group in self._sharded_groups():
            group.refresh()

    def move_groups(self) -> None:
        """`refresh_groups` after the module was moved or converted: the shards are in new memory that nothing else
        refers to, so they can be placed together."""
        for group in self._sharded_groups():
            if group.refresh():
                group.lay_together()

    def _sharded_groups(self) -> list[ParamGroup]:
        return [group for group in (*self.groups, *self.borrowed) if group.phase is Phase.SHARDED]

    # --- forms -------------------------------------------------------------------------------------------------------

    def unshard(self, prefetching: bool = False) -> None:
        """Issue the all-gathers that are needed. A prefetch in backward gathers the last group first."""
        context = self.context or self.ready_context()
        groups = [*self.groups, *self.borrowed] if self.select is None else self.select(True)
        with outside_transforms():
            for group in reversed(groups) if prefetching and running_backward() >= 0 else groups:
                group.users.add(id(self))
                group.unshard(context.memory, prefetching)

    def wait_for_unshard(self) -> None:
        """Make the parameters usable."""
        with outside_transforms():
            for group in self.groups:
                group.wait_for_unshard()
            for group in self.borrowed:
                group.wait_for_unshard()

    def rename(self, fqn: str) -> None:
        """Take the name relative to the root."""
        self.fqn = fqn
        for group in self.groups:
            group.channel.fqn = fqn

    def forget_uses(self) -> None:
        """The forwards so far will have no backward."""
        for group in self.groups:
            group.forget_use()

    def reshard(self, to_smaller: bool = False, within_step: bool = False, keep_values: bool = False) -> None:
        """Free unsharded parameters that no other unit computes with. `to_smaller`: keep copies on the smaller mesh,
        where there is one. `within_step`: the parameters will not change before the next unshard. `keep_values`: keep
        their memory in case they do not."""
        if self.context is None:
            return
        groups = [*self.groups, *self.borrowed] if self.select is None else self.select(False)
        with outside_transforms():
            for group in groups:
                group.users.discard(id(self))
                if not group.users:
                    to = Phase.INNER if within_step and group.roles.sharded_replicas else Phase.SHARDED
                    to = Phase.SMALLER if to_smaller and group.smaller is not None else to
                    group.reshard(self.context.memory, to, keep_values)

    def reshard_all(self, to_change: bool = True) -> None:
        """Free all unsharded parameters, used or kept, because the sharded ones will be changed. Without `to_change`
        they will only be read, which may happen on one rank only. So it must not change what the next gather sends:
        kept frozen parameters stay."""
        if self.context is not None:
            for group in (*self.groups, *self.borrowed):
                group.users.clear()
                group.settle()
                group.take_back()
                group.adopt_changes()
                group.reshard(self.context.memory)
                if to_change:
                    group.forget_kept(self.context.memory)

    def drop_stale(self) -> None:
        """Before a forward of the root, or of the unit alone: reshard what was gathered before an optimizer stepped it,
        by a forward without a backward, or kept."""
        for group in self.groups:
            if group.phase is Phase.SHARDED:
                group.warn_of_assigned_data()
            else:
                self.check_unconverted()
                self._adopt_changes()
                if group.is_stale:
                    self.reshard_all()

    def check_unconverted(self) -> None:
        """Raise if a part of the module was converted while it was unsharded."""
        converted = [fqn for group in self.groups if (fqn := group.take_back()) is not None]
        if converted:
            raise OrderError(
                f"'{converted[0]}' was moved or converted while it was unsharded, by a call of a module that is no "
                "unit, which does not reach its shards. Call reshard() on the model before such a call."
            )

    # --- forward -----------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: unshard, prefetch, cast the inputs."""
        context = self.context or self.ready_context()
        context.step.check_backward_ended()
        is_recomputation = self.stage is Stage.BACKWARD
        # A forward that raised leaves the unit in this stage as well.
        is_nested = self.stage is Stage.FORWARD and len(self._modules) == 1 and is_within_itself(module)
        self._depth = self._depth + 1 if is_nested else 0
        is_new = not is_recomputation and not is_nested
        if context.root() is self and is_new:
            with profiler_range("FSDP::root_pre_forward"):
                context.begin_forward()
                for hook in context.hooks.before_forward:
                    hook(args, kwargs)
                args, kwargs = self._to_device(args, kwargs)
        elif not context.schedule.in_root_forward:
            context.follow_compute()
            if is_new and running_backward() < 0:
                self.drop_stale()
        is_first = is_new and (not self._to_run or len(self._modules) == 1)
        if is_first:
            if running_backward() >= 0 and self.in_order:
                _make_room_for_recomputation(context)
            emit("pre_forward", self.fqn)
            self.stage = Stage.FORWARD
            self._to_run = {id(m) for m in self.modules}
            self._was_whole = any(group.phase in (Phase.GATHERING, Phase.UNSHARDED) for group in self.groups)
            if self._was_whole:
                self._adopt_changes()
        self.unshard()
        self.wait_for_unshard()
        if not is_recomputation and self.in_order:
            self._prefetch_in_forward(context)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floating(self.policy.param_dtype, (args, kwargs), "FSDP::cast_forward_inputs")
        if is_first:
            self.first_node = next_node_number()
        if is_first and self.groups and torch.is_grad_enabled() and not self._holds_container():
            end, again = self.post_backward, self._pre_backward_again
            args, kwargs, self._sees_end = on_backward_end(end, again, args, kwargs)
        return args, kwargs

    def _prefetch_in_forward(self, context: Context) -> None:
        for hook in context.hooks.unit_started:
            hook(self)
        for unit in _prefetched(self.forward_prefetch):
            with profiler_range("FSDP::forward_prefetch for", unit.fqn):
                unit.unshard(prefetching=True)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Forward hook: cast the outputs, hook their backward, reshard."""
        output = cast_floating(self.policy.output_dtype, output, "FSDP::cast_forward_outputs")
        if self.stage is Stage.BACKWARD:  # recomputation
            for group in self.groups:
                group.gradients.keep_hooks_last()
            return output
        assert self.context is not None
        if self._depth:
            self._depth -= 1
            return self._hook_backward(output)
        if len(self._modules) == 1:
            self._to_run.clear()  # `module` may be a shallow copy
        else:
            self._to_run.discard(id(module))
        if not self._to_run:
            emit("post_forward", self.fqn)
        output = self._hook_backward(output)
        if not self._to_run:
            self.stage = Stage.IDLE
            self._to_run.clear()
            if running_backward() >= 0:
                if self.in_order:
                    self.context.recomputed.append(ref(self))
                self.context.expect_end_of_backward()
            else:
                self._reshard_after_forward(output)
        if self.context.root() is self:
            self.context.end_forward()
        elif not self.context.schedule.in_root_forward and running_backward() < 0:
            for hook in self.context.hooks.after_forward_alone:
                hook()
        return output

    def _holds_container(self) -> bool:
        """Whether a module of the list never runs, so that the end of its backward cannot be seen."""
        return len(self._modules) > 1 and not all(has_forward(module) for module in self.modules)

    def complete_forward(self) -> None:
        """The root's forward is over: modules that have not run will not run any more."""
        # The root may have been called from within this unit's own forward, which then continues.
        if self.stage is Stage.FORWARD and not any(map(is_running, self.modules)):
            emit("post_forward", self.fqn)
            self.stage = Stage.IDLE
            self._to_run.clear()
            self._reshard_after_forward()

    def _hook_backward(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        assert self.context is not None
        order, position = None, -1
        if self.in_order and (self.groups or self.select is not None):
            order, position = self.context.schedule.finished(self)
        conversions = self._conversions()

        def begin() -> None:
            with profiler_range("FSDP::pre_backward", self.fqn) if profiler_is_on() else NOTHING:
                self.pre_backward(order, position, conversions)

        return on_backward_begin(begin, output, self.first_node)

    def _conversions(self) -> int:
        """How often unsharded parameters were recreated, because those before did not match any more."""
        return sum(map(_conversions_of, self.groups))

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move inputs to the accelerator."""
        if self.device.type == "cpu":
            return args, kwargs
        with profiler_range("FSDP::inputs_to_device"):
            moved = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), (args, kwargs))
        return moved[0], moved[1]

    # --- backward ----------------------------------------------------------------------------------------------------

    def pre_backward(self, order: Pass | None, position: int, conversions: int) -> None:
        """Hook on the outputs' gradients: unshard, prefetch.

        Raises:
            OrderError: parameters were converted since the forward, when `_conversions` was `conversions`.
        """
        assert self.context is not None
        is_known_whole = self._sees_end and backward_is_whole()
        if not (is_known_whole or self.settings.reshard_after_forward):  # the user may have unsharded parameters
            self._check_not_captured()
        self.context.expect_end_of_backward()
        if order is not None:
            self.context.schedule.notes = order.notes
        if self.stage is Stage.BACKWARD:
            if self.select is not None and self.in_order and self.settings.unshard_in_backward:
                self.unshard()  # a second forward in this backward may need other groups than the first
            return
        self._check_not_stepped()
        if self._sees_end and not is_known_whole:
            self.context.step.is_partial = True
        emit("pre_backward", self.fqn)
        self.stage = Stage.BACKWARD
        self._to_run.clear()
        for group in self.groups:
            group.adopt_changes()
            group.gradients.begin_backward()
        if self.settings.unshard_in_backward:
            self.unshard()
            if self._conversions() != conversions:
                raise OrderError(
                    f"unit '{self.fqn or '(root)'}': parameters were converted between forward and backward. Run the "
                    "backward before to(dtype), or the forward again after it. After this error call "
                    "model.reset_iter_state()."
                )
            self.wait_for_unshard()
        if order is not None:
            explicit = _prefetched(self.backward_prefetch)
            for unit in self.context.schedule.backward_targets(explicit, order, position):
                if unit.settings.unshard_in_backward:
                    with profiler_range("FSDP::backward_prefetch for", unit.fqn) if profiler_is_on() else NOTHING:
                        unit.unshard(prefetching=True)

    def _check_not_captured(self) -> None:
        """Raise within `torch.autograd.grad` with respect to an unsharded parameter, unless gradients are finalised by
        hand: pipelines that split backward do that, and set the gradients themselves."""
        root = (self.context or self.ready_context()).root()
        if not self.settings.requires_gradient_sync or (root is not None and root.settings.manual_finalization):
            return
        for group in self.groups:
            if (fqn := group.gradients.find_captured()) is not None:
                raise OrderError(
                    f"'{fqn}': torch.autograd.grad would return this rank's own gradient of it. Call loss.backward(), "
                    "which gives sharded parameters the mean over the ranks; for gradients of this rank compute the "
                    "loss within fsdp2.full_params(model)."
                )

    def _check_not_stepped(self) -> None:
        """Before parameters are gathered for backward: raise if an optimizer has stepped them in this backward."""
        if any(group.gradients.were_taken for group in self.groups) and self.in_backward().when_reduced:
            raise OrderError(
                f"unit '{self.fqn or '(root)'}': backward needs its parameters again, but step_in_backward "
                "stepped them when their gradients were complete. This happens to a unit that is used in several "
                "reentrant checkpoints: use "
                "use_reentrant=False, or step after backward. After this error call model.reset_iter_state()."
            )

    def _pre_backward_again(self) -> None:
        """A backward through this unit's own backward reaches the unit again."""
        self.pre_backward(None, -1, self._conversions())

    def backward_reached(self) -> None:
        """A gradient has arrived, by no output of the unit: of a tensor that a module has kept, or of a loss outside of
        the forward that reads a parameter. The end of backward reduces it."""
        (self.context or self.ready_context()).expect_end_of_backward()

    def gradients_ready(self, index: int) -> None:
        """All trainable parameters of a group have a gradient, so their reduction can start before the unit's backward
        ends. If other ranks may lack some gradients, all ranks start it at the end of backward instead. Parameters that
        are used as they are cannot be stepped before the unit's backward ends."""
        (self.context or self.ready_context()).expect_end_of_backward()
        settings = self.in_backward()
        steps_what_is_used = bool(settings.when_reduced) and self.groups[index].roles.shard_axis is None
        waits = settings.reduce_unused or self.reduces_late is not None or steps_what_is_used
        if settings.requires_gradient_sync and not waits:
            self._reduce(self.groups[index], settings)

    def _reduce(self, group: ParamGroup, settings: UnitSettings, at_end: bool = False) -> None:
        assert self.context is not None
        if group.roles.replicate_group is not None and settings.requires_all_reduce:
            self.context.in_flight.finish_partials()
        if self.reduces_late is not None:
            settings = self.reduces_late(group, settings)
        with outside_transforms():
            reductions = group.gradients.take(settings, at_end, self.context.streams)
            self.context.in_flight.start(reductions)

    def post_backward(self) -> None:
        """The unit's backward has ended, at least for now: reshard, and reduce the remaining gradients."""
        emit("post_backward", self.fqn)
        self.stage = Stage.DONE
        self._to_run.clear()
        settings = self.in_backward()
        if settings.reshard_after_backward:
            with profiler_range("FSDP::post_backward_reshard", self.fqn) if profiler_is_on() else NOTHING:
                self.reshard(within_step=not settings.ends_step)
        if settings.requires_gradient_sync and not settings.reduce_unused and self.reduces_late is None:
            for group in reversed(self.groups):
                self._reduce(group, settings)

    def finish_backward(self) -> None:
        """The backward pass is over: reduce and reshard what is left. If another backward of the step follows,
        parameters that were prefetched but not used stay for it."""
        assert self.context is not None
        if self.stage is Stage.FORWARD and any(map(is_running, self.modules)):
            return  # a backward within its forward, the rest of which needs its parameters
        if self.stage is Stage.BACKWARD:
            self.post_backward()
        elif self.stage is Stage.IDLE:
            self._adopt_changes()  # unsharded by hand, for a loss outside of the forward
        settings = self.in_backward()
        if settings.reshard_after_backward and self.context.is_last_backward:
            self.reshard(within_step=not settings.ends_step)
        if settings.requires_gradient_sync:
            for group in reversed(self.groups):
                self._reduce(group, settings, at_end=True)
        for group in self.groups:
            group.gradients.end_backward()
        self.stage = Stage.IDLE
        self._to_run.clear()

    def reset(self) -> None:
        """Recover from an error: reshard, and forget the iteration and all gradients that were not reduced."""
        self.stage = Stage.IDLE
        self._to_run.clear()
        for group in (*self.groups, *self.borrowed):
            group.abandon_gather()
            group.changes.forget()
        self.reshard_all()
        for group in self.groups:
            group.gradients.drop()

    def check_no_partials(self) -> None:
        """Before gradients are finalised by hand: raise if some wait for an all-reduce, or would wait afterwards."""
        for group in self.groups:
            partial_fqns = [param.fqn for param in group.gradients.partials]
            off = group.roles.replicate_group is not None and not self.settings.requires_all_reduce
            if partial_fqns or off:
                raise OrderError(
                    f"finalize_backward: unit '{self.fqn or '(root)'}' has all-reduce turned off, or gradients that "
                    "wait for one "
                    f"({partial_fqns}); call set_requires_all_reduce(True) before the first backward"
                )


def _gradients_ready(weak_unit: "ref[Unit]", index: int) -> None:
    unit = weak_unit()
    if unit is not None:
        unit.gradients_ready(index)


def _backward_reached(weak_unit: "ref[Unit]") -> None:
    unit = weak_unit()
    if unit is not None:
        unit.backward_reached()


def _prefetched(weak_units: Sequence["ref[Unit]"]) -> list[Unit]:
    """The units of a list that are alive and have a place in the order."""
    return [unit for weak in weak_units if (unit := weak()) is not None and unit.in_order]


def _make_room_for_recomputation(context: Context) -> None:
    """Before a unit is recomputed, reshard all recomputed units but the last: the backwards of the last two follow at
    once, and need not gather them again. So that two are in memory, nothing else is."""
    while len(context.recomputed) > 1:
        unit = context.recomputed.popleft()()
        if unit is not None and unit.stage is Stage.IDLE:
            unit._reshard_after_forward()
    if context.recomputed:
        context.memory.free_all()
