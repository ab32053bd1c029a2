"""`Unit`: what one `fully_shard` call manages: modules, and the groups of their parameters. Layer: runtime. Its hooks
in forward and backward are functions: `forward`, `backward`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn

from fsdp2._torch import outside_transforms, running_backward
from fsdp2.errors import OrderError
from fsdp2.events import emit
from fsdp2.policies import MixedPrecisionPolicy, UnitSettings
from fsdp2.runtime import backward
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.in_flight import InFlight
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.state import Stage, State
from fsdp2.runtime.step import Step
from fsdp2.runtime.tree import tensors_within


class Role(Protocol):
    """What a feature changes in a unit for as long as it has its root.

    Attributes:
        in_order: whether the unit has a place in the order of units, and is prefetched.
    """

    in_order: bool

    def select(self, unsharding: bool) -> Sequence[Bucket]:
        """The groups that `unshard` and `reshard` act on, instead of its own and the borrowed."""

    def reduces_late(self, group: Bucket, settings: UnitSettings) -> UnitSettings:
        """All its reductions wait for the end of the whole backward; the settings of that of `group`."""


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
_conversions_of: Callable[[Bucket], int] = attrgetter("conversions")
GATHERED = (Phase.GATHERING, Phase.UNSHARDED)


def units_with(params: Iterable[torch.Tensor]) -> "list[Unit]":
    """The units of this process that manage some of these sharded parameters, or parts of them."""
    ids = {id(param) for param in params}
    groups = [(unit, group) for unit in _units for group in unit.groups]
    return [*dict.fromkeys(unit for unit, group in groups if any(id(param.sharded) in ids for param in group.params))]


class Unit:
    """One module, or a list of modules that gather and reduce together.

    Attributes:
        members: its modules, weakly: modules own their units.
        groups: the parameters, one group per mesh and policy; none for a unit without parameters.
        borrowed: groups of other units, which this unit gathers too (tied weights); their owner reduces them.
        fqn: relative to the root once there is one; ``""`` for the root.
        step: shared with the root; None until the first forward or unshard.
        role: what a feature changes; None for a plain unit.
        reductions: those that this unit, as a root, shares with other roots; None if it shares none.
        forward_prefetch, backward_prefetch: explicit lists; weak, since two units may name each other.
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
        self.members: list[ref[nn.Module]] = []
        self.groups: list[Bucket] = []
        self.borrowed: list[Bucket] = []
        self.fqn = ""
        self.step: Step | None = None
        self.device = device
        self.policy = policy
        self.settings = settings
        self.forward_prefetch: list[ref[Unit]] = []
        self.backward_prefetch: list[ref[Unit]] = []
        self.followers: list[Unit] = []
        self.role: Role | None = None
        self.reductions: InFlight | None = None
        self.state = State(settings)
        _units.add(self)
        self.adopt(modules, param_lists)

    def adopt(self, modules: Sequence[nn.Module], param_lists: Sequence[Sequence[ManagedParameter]]) -> None:
        """Manage these modules and parameters, and no others."""
        self.members = [ref(module) for module in modules]
        self.groups = []
        for params in param_lists:
            ready = partial(backward.gradients_ready, ref(self), len(self.groups))
            self.groups.append(Bucket(params, ready, partial(backward.reached, ref(self))))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are still alive."""
        return [module for weak in self.members if (module := weak()) is not None]

    @property
    def params(self) -> list[ManagedParameter]:
        """The parameters of all groups, without those whose shard is another parameter's."""
        return [param for group in self.groups for param in group.params if param.at_rest is not None]

    @property
    def name(self) -> str:
        """Its FQN, for messages."""
        return self.fqn or "(root)"

    def ready_step(self) -> Step:
        """The step; a provisional one for a unit that no root's forward has reached yet. Raises like `refresh`."""
        if self.step is None:
            self.refresh()
            self.step = Step([self], self.device, is_provisional=True)
        return self.step

    def rename(self, fqn: str) -> None:
        """Take the name relative to the root."""
        self.fqn = fqn
        for group in self.groups:
            group.channel.fqn = fqn

    # --- following the modules ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt parameters that were moved, converted or replaced.

        Raises:
            OrderError: parameters are still on the meta device, or not where offload keeps them.
        """
        on_meta = [fqn for group in self.groups for fqn in group.on_meta()]
        if on_meta:
            raise OrderError(
                f"unit '{self.name}': parameters are still on the meta device: {on_meta}. Materialise them first: "
                "fsdp2.init.materialize(model), or fsdp2.checkpoint.load(folder, model=model)."
            )
        elsewhere = [each for group in self.groups for each in group.not_at_home()]
        if elsewhere:
            raise OrderError(
                f"unit '{self.name}' is offloaded, so its sharded parameters must be on the CPU; these are not: "
                f"{elsewhere}. Move them there: model.to('cpu'); fsdp2.init.materialize(model) puts them there itself."
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

    def _sharded_groups(self) -> list[Bucket]:
        return [group for group in (*self.groups, *self.borrowed) if group.phase is Phase.SHARDED]

    def begin_step(self, awaits_backward: bool, has_raised: bool) -> None:
        """The root's forward starts. `awaits_backward`: forwards so far may still have a backward. `has_raised`: the
        last forward raised; what was prefetched and not used is stale, as parameters may have changed since."""
        if not awaits_backward:
            for group in self.groups:
                group.changes.forget_use()
        if has_raised:
            self.reshard()
        self.drop_stale()

    def drop_stale(self) -> None:
        """Before a forward of the root, or of the unit alone, or `unshard()`: follow the sharded parameters, and
        reshard what was gathered before an optimizer stepped it, by a forward without a backward, or kept."""
        assert self.step is not None
        for group in (*self.groups, *self.borrowed):
            if group.look(self.step.memory):
                self.reshard_all()

    def check_unconverted(self) -> None:
        """Raise if a part of the module was converted while it was unsharded."""
        for group in self.groups:
            if group.phase is Phase.UNSHARDED:
                group.changes.check_unconverted()

    def adopt_changes(self) -> None:
        """Take over what was changed in place, while it was unsharded, outside of forward and backward."""
        for group in (*self.groups, *self.borrowed):
            group.adopt_changes()

    # --- forms -------------------------------------------------------------------------------------------------------

    def unshard(self, prefetching: bool = False) -> None:
        """Issue the all-gathers that are needed. A prefetch in backward gathers the last group first."""
        with outside_transforms():
            memory = (self.step or self.ready_step()).memory
            groups = [*self.groups, *self.borrowed] if self.role is None else self.role.select(True)
            for group in reversed(groups) if prefetching and running_backward() >= 0 else groups:
                group.users.add(id(self))
                group.unshard(memory, prefetching)

    def wait_for_unshard(self) -> None:
        """Make the parameters usable."""
        with outside_transforms():
            for group in self.groups:
                group.wait_for_unshard()
            for group in self.borrowed:
                group.wait_for_unshard()

    @property
    def in_order(self) -> bool:
        """Whether it has a place in the order of units, and is prefetched."""
        return self.role is None or self.role.in_order

    @staticmethod
    def alive(weak_units: Sequence["ref[Unit]"]) -> "list[Unit]":
        """The units of an explicit list that are alive and have a place in the order."""
        return [unit for weak in weak_units if (unit := weak()) is not None and unit.in_order]

    def conversions(self) -> int:
        """How often unsharded parameters were recreated, because those before did not match any more."""
        return sum(map(_conversions_of, self.groups))

    def reshard(self, to_smaller: bool = False, within_step: bool = False, keep_values: bool = False) -> None:
        """Free unsharded parameters that no other unit computes with. `to_smaller`: keep copies on the smaller mesh,
        where there is one. `within_step`: the parameters will not change before the next unshard. `keep_values`: keep
        their memory in case they do not."""
        if self.step is None:
            return
        with outside_transforms():
            for group in [*self.groups, *self.borrowed] if self.role is None else self.role.select(False):
                group.users.discard(id(self))
                if not group.users:
                    keeps_part = within_step if group.smaller is None else to_smaller
                    is_part = keeps_part and group.source is not None and group.source.keeps_part
                    group.reshard(self.step.memory, Phase.PART if is_part else Phase.SHARDED, keep_values)

    def reshard_all(self, to_change: bool = True) -> None:
        """Free all unsharded parameters, used or kept, because the sharded ones will be changed. Without `to_change`
        they will only be read, which may happen on one rank only. So it must not change what the next gather sends:
        kept frozen parameters stay."""
        if self.step is not None:
            for group in (*self.groups, *self.borrowed):
                group.users.clear()
                group.clear(self.step.memory, to_change)

    def complete_forward(self) -> None:
        """It is in a forward, and the root's is over, or a new one starts: modules that have not run will not run any
        more. (The root may have been called from within this unit's own forward, which then continues.)"""
        if not self.state.calls:
            emit("post_forward", self.fqn)
            self.state.stage = Stage.IDLE
            self.state.to_run.clear()
            self.reshard_after_forward()

    def reshard_after_forward(self, output: Any = None) -> None:
        """Its forward is over: reshard as the settings say, and as a backward may follow or not."""
        how, for_backward = self.settings.reshard_after_forward, torch.is_grad_enabled()
        if how is None and for_backward and output is not None:  # of a method that turns gradients off itself?
            for_backward = any(tensor.requires_grad for found in tensors_within(output) for tensor in found)
        if how:
            self.reshard(to_smaller=for_backward and how is not True, within_step=for_backward)
        elif how is None and not for_backward and not self.state.was_whole:
            self.reshard(keep_values=True)
        else:
            for group in self.groups:
                group.changes.check_none()

    # --- backward ----------------------------------------------------------------------------------------------------

    def in_backward(self) -> UnitSettings:
        """The settings for this backward."""
        step, settings = self.step or self.ready_step(), self.settings
        if settings.zero is not None or settings.when_reduced:
            settings = settings.in_backward(step.is_last_backward)
        return replace(settings, requires_gradient_sync=False) if step.finishes is False else settings

    def reduce(self, group: Bucket, settings: UnitSettings, at_end: bool = False) -> None:
        """Reduce the gradients of `group` that exist; at the end of backward also those that `settings` ask for."""
        with outside_transforms():
            assert self.step is not None
            in_flight = self.step.reductions
            if group.roles.replicate_group is not None and settings.requires_all_reduce:
                in_flight.finish_partials()
            if self.role is not None:
                settings = self.role.reduces_late(group, settings)
            if reductions := group.gradients.take(settings, at_end, self.step.memory.streams):
                in_flight.start(reductions)

    def reset(self) -> None:
        """Recover from an error: reshard, and forget the iteration and all gradients that were not reduced."""
        self.state.stage = Stage.IDLE
        self.state.to_run.clear()
        self.state.calls.clear()
        for group in (*self.groups, *self.borrowed):
            group.abandon_gather()
            group.changes.forget()
        self.reshard_all()
        for group in self.groups:
            group.gradients.drop()
