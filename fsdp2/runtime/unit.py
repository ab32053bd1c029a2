"""`Unit`: modules that gather and reduce together, and the groups of their parameters. Layer: runtime. Its forward
and backward hooks are functions, in the modules `forward` and `backward`.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from fsdp2._torch import running_backward
from fsdp2.errors import CollectiveError, OrderError
from fsdp2.events import emit
from fsdp2.policies import MixedPrecisionPolicy, UnitSettings
from fsdp2.runtime import backward
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.state import Stage, State, Stays
from fsdp2.runtime.step import Step
from fsdp2.runtime.tree import tensors_within

GATHERED = (Phase.GATHERING, Phase.UNSHARDED)


class Role(Protocol):
    """How a feature changes a unit, for as long as its root exists. `in_order`: whether the unit takes part in the
    order of units, and is prefetched."""

    in_order: bool

    def select(self, unsharding: bool) -> Sequence[Bucket]:
        """The groups that `unshard` and `reshard` act on, instead of the unit's own and borrowed ones."""

    def reduction_settings(self, group: Bucket, settings: UnitSettings) -> UnitSettings:
        """The settings for reducing `group`. All reductions of the unit wait for the end of the whole backward."""


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


class Unit:
    """One module, or a list of modules that gather and reduce together.

    Attributes:
        members: weak references to its modules, which own it.
        groups: the parameters, one group per mesh and policy; none for a unit without parameters.
        borrowed: groups of other units, which this unit gathers too (tied weights); their owner reduces them.
        fqn: relative to the root once there is one; ``""`` for the root.
        step: shared with the root; None until the first forward or unshard.
        role: how a feature changes the unit; None for a plain unit.
        forward_prefetch, backward_prefetch: explicit lists; weak, since two units may name each other.
        followers: units that get this unit's settings too.
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
        self.state = State(settings)
        self.adopt(modules, param_lists)

    def adopt(self, modules: Sequence[nn.Module], param_lists: Sequence[Sequence[ManagedParameter]]) -> None:
        """Manage these modules and parameters instead of the current ones."""
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
        """The parameters of all groups, without those that share the shard of another parameter."""
        return [param for group in self.groups for param in group.params if param.at_rest is not None]

    @property
    def name(self) -> str:
        """Its FQN, for messages."""
        return self.fqn or "(root)"

    @property
    def in_order(self) -> bool:
        """Whether it takes part in the order of units, and is prefetched."""
        return self.role is None or self.role.in_order

    def ready_step(self) -> Step:
        """The step; a provisional one as long as no root's forward has run. Raises like `refresh`."""
        if self.step is None:
            self.refresh()
            self.step = Step([self], self.device, is_provisional=True)
        return self.step

    # --- following the modules ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt parameters that were moved, converted or replaced. Raises `OrderError` if any is on the meta device."""
        on_meta = [param.fqn for group in self.groups for param in group.params if param.held.is_meta]
        if on_meta:
            raise OrderError(
                f"unit '{self.name}': parameters are still on the meta device: {on_meta}. Materialise them first: "
                "fsdp2.init.materialize(model), or fsdp2.checkpoint.load(folder, model=model)."
            )
        self.refresh_groups()

    def refresh_groups(self, are_new: bool = False) -> None:
        """`refresh` without the checks, for a model that is being materialised, loaded or converted. `are_new`: only
        the modules refer to shards that were moved, so these may be moved again, next to each other."""
        for group in (*self.groups, *self.borrowed):
            if group.phase is Phase.SHARDED and group.refresh() and are_new:
                group.lay_together()

    def drop_stale(self) -> None:
        """Before a forward of the root or of this unit alone, or `unshard()`: adopt changes of the sharded parameters,
        and reshard if older values are still unsharded (kept, or left by a forward without a backward)."""
        assert self.step is not None
        for group in (*self.groups, *self.borrowed):
            if group.follow_changes(self.step.memory):
                self.reshard_all()

    # --- forms: call these outside of transforms of `torch.func` ------------------------------------------------------

    def unshard(self, prefetching: bool = False) -> None:
        """Issue the all-gathers that are needed. A prefetch in backward gathers the last group first."""
        memory = (self.step or self.ready_step()).memory
        groups = [*self.groups, *self.borrowed] if self.role is None else self.role.select(True)
        for group in reversed(groups) if prefetching and running_backward() >= 0 else groups:
            group.users.add(id(self))
            if group.phase not in GATHERED:
                group.unshard(memory, prefetching)

    def wait_for_unshard(self) -> None:
        """Make the parameters usable."""
        for group in (*self.groups, *self.borrowed):
            group.wait_for_unshard()

    def reshard(self, stays: Stays = Stays.NOTHING) -> None:
        """Free unsharded parameters that no other unit uses, except for what `stays`."""
        for group in [*self.groups, *self.borrowed] if self.role is None else self.role.select(False):
            group.users.discard(id(self))
            if self.step is not None and not group.users and group.phase is not Phase.SHARDED:
                group.reshard(self.step.memory, stays)

    def reshard_all(self, to_change: bool = True) -> None:
        """Free all unsharded parameters, used or kept. `to_change`: the sharded ones are about to change. Otherwise
        they will only be read, perhaps on one rank only, and kept values of frozen parameters stay."""
        if self.step is not None:
            for group in (*self.groups, *self.borrowed):
                group.users.clear()
                group.clear(self.step.memory, to_change)
            if self.step.is_provisional:  # units that borrow its groups have a `ReleasedMemory` of their own
                self.step.memory.free_all()

    def end_forward(self, output: Any = None) -> None:
        """Its forward is over: all its modules have run, the root's forward has ended, or a new one starts. A unit
        that a checkpoint recomputed stays unsharded, because its backward follows."""
        assert self.step is not None
        emit("post_forward", self.fqn)
        self.state.stage = Stage.IDLE
        if running_backward() < 0:
            self.reshard_after_forward(output)
            return
        if self.in_order:
            self.step.recomputed.append(ref(self))
        self.step.expect_end_of_backward()

    def reshard_after_forward(self, output: Any = None) -> None:
        """Reshard according to the settings, and to whether a backward may follow."""
        how, for_backward = self.settings.reshard_after_forward, torch.is_grad_enabled()
        if how is None and for_backward and output is not None:  # it may have run under its own `no_grad`
            for_backward = any(tensor.requires_grad for found in tensors_within(output) for tensor in found)
        if how:
            stays = Stays.PART if how is True else Stays.SMALLER
            self.reshard(stays if for_backward else Stays.NOTHING)
        elif how is None and not for_backward and not self.state.was_whole:
            self.reshard(Stays.VALUES)
        else:
            for group in self.groups:
                group.changes.check_none()

    def reset(self) -> None:
        """Recover from an error: reshard, and drop the iteration and all unreduced gradients."""
        self.state = State(self.settings)
        for group in (*self.groups, *self.borrowed):
            with suppress(CollectiveError, OrderError):  # a prefetch failed too; the first failure was raised
                group.wait_for_unshard()
            group.changes.forget()
        self.reshard_all()
        for group in self.groups:
            group.gradients.drop()
