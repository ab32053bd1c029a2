"""`Holding`: the modules and the param groups of a unit, and the groups' changes of form. Layer: runtime, below unit.

The unit decides which form is needed when.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from weakref import ref

from torch import nn

from fsdp2._torch import backward_is_running, outside_transforms
from fsdp2.errors import OrderError
from fsdp2.runtime.context import Context
from fsdp2.runtime.param_group import ParamGroup, Phase
from fsdp2.runtime.parameter import ManagedParameter

__all__ = ["Holding"]


class Holding(ABC):
    """What a unit manages.

    Attributes:
        groups: the parameters, one group per mesh; none for a unit without parameters.
        borrowed: groups of other units, with parameters that modules of this unit also hold (tied weights). This unit
            gathers them too; their owner reduces them.
        fqn: relative to the root once there is one; ``""`` for the root.
        context: shared with the root; None until the first forward or unshard.
    """

    def __init__(self, modules: Sequence[nn.Module], param_lists: Sequence[Sequence[ManagedParameter]]):
        self._modules: list[ref[nn.Module]] = []
        self.groups: list[ParamGroup] = []
        self.borrowed: list[ParamGroup] = []
        self.fqn = ""
        self.context: Context | None = None
        self.adopt(modules, param_lists)

    @abstractmethod
    def ready_context(self) -> Context:
        """The context, created if there is none."""

    @abstractmethod
    def gradients_ready(self, index: int) -> None:
        """All trainable parameters of group `index` have a gradient."""

    def adopt(self, modules: Sequence[nn.Module], param_lists: Sequence[Sequence[ManagedParameter]]) -> None:
        """Manage these modules and parameters, and no others."""
        self._modules = [ref(module) for module in modules]
        self.groups = []
        for params in param_lists:
            self.groups.append(ParamGroup(params, partial(_gradients_ready, ref(self), len(self.groups))))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are still alive."""
        return [module for weak in self._modules if (module := weak()) is not None]

    @property
    def params(self) -> list[ManagedParameter]:
        """The parameters of all groups."""
        return [param for group in self.groups for param in group.params]

    # --- following the modules ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt parameters that were moved, converted or replaced.

        Raises:
            OrderError: parameters are still on the meta device.
        """
        on_meta = [fqn for group in self.groups for fqn in group.on_meta()]
        if on_meta:
            raise OrderError(
                f"unit '{self.fqn}': parameters are still on the meta device: {on_meta}. Materialise them first: "
                "fsdp2.init.materialize(model), or fsdp2.checkpoint.load(folder, model=model)."
            )
        elsewhere = [each for group in self.groups for each in group.not_at_home()]
        if elsewhere:
            raise OrderError(
                f"unit '{self.fqn}' is offloaded, so its sharded parameters must be on the CPU; these are not: "
                f"{elsewhere}. Move them there: model.to('cpu'); fsdp2.init.materialize(model) puts them there itself."
            )
        for group in self._sharded_groups():
            group.refresh()

    def refresh_groups(self) -> None:
        """The same without the checks, for when a model is being materialised or loaded."""
        for group in self._sharded_groups():
            group.refresh()

    def move_groups(self) -> None:
        """The same after the module was moved or converted. Shards are then in new memory that nothing else refers to,
        so they can be placed contiguously."""
        for group in self._sharded_groups():
            if group.refresh():
                group.lay_together()

    def _sharded_groups(self) -> list[ParamGroup]:
        return [group for group in (*self.groups, *self.borrowed) if group.phase is Phase.SHARDED]

    # --- forms -------------------------------------------------------------------------------------------------------

    def unshard(self, prefetching: bool = False) -> None:
        """Issue the all-gathers that are needed. A prefetch in backward gathers the last group first."""
        context = self.ready_context()
        groups = [*self.groups, *self.borrowed] if self.borrowed else self.groups
        with outside_transforms():
            for group in reversed(groups) if prefetching and backward_is_running() else groups:
                group.users.add(id(self))
                group.unshard(context.memory, prefetching)

    def wait_for_unshard(self) -> None:
        """Make the parameters usable."""
        with outside_transforms():
            for group in self.groups:
                group.wait_for_unshard()
            for group in self.borrowed:
                group.wait_for_unshard()

    def forget_uses(self) -> None:
        """No backward will come to the forwards so far."""
        for group in self.groups:
            group.forget_use()

    def reshard(self, to_smaller: bool = False, within_step: bool = False) -> None:
        """Free unsharded parameters that no other unit computes with.

        Args:
            to_smaller: keep a copy on the smaller mesh.
            within_step: the parameters will not change before the next unshard, so inner shards may stay.
        """
        if self.context is None:
            return
        with outside_transforms():
            for group in (*self.groups, *self.borrowed):
                group.users.discard(id(self))
                if not group.users:
                    small = (to_smaller and group.smaller is not None) or (within_step and group.roles.sharded_replicas)
                    group.reshard(self.context.memory, small)

    def reshard_all(self) -> None:
        """Free all unsharded parameters, even those that other units use or that were kept, because the sharded ones
        will be read or changed."""
        if self.context is not None:
            for group in (*self.groups, *self.borrowed):
                group.users.clear()
                group.reshard(self.context.memory)
                group.forget_kept(self.context.memory)


def _gradients_ready(weak_holding: "ref[Holding]", index: int) -> None:
    holding = weak_holding()
    if holding is not None:
        holding.gradients_ready(index)
