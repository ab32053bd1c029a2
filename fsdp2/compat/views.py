"""A unit as clients see torch's: through `_get_fsdp_state()`, `fully_shard.state` and torch's registry of states.
Layer: compat.

torch's memory tracker takes snapshots around the forward hooks of each sharded module, and around its `pre_backward`
and `post_backward`: it removes the hooks, registers its own that call the former ones, and replaces the two methods.
NeMo Automodel reads the policy, axolotl and verl change when a unit reshards. Only the attributes that these use are
here; this is not a general view of a unit.
"""

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import nn

from fsdp2._torch import fully_shard_state, set_fully_shard_state
from fsdp2.pipelining import StageState
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.runtime.attach import post_forward, pre_forward
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.unit import Unit, unit_for

__all__ = ["StateView", "state_view"]


def state_view(module: nn.Module) -> "StateView":
    """The view of the unit that manages `module`, which must be sharded; the same object at each call, for each of its
    modules, and where torch looks for it."""
    view = fully_shard_state(module)
    if not isinstance(view, StateView):
        unit = unit_for(module)
        view = StateView(unit)
        for each in unit.modules:
            set_fully_shard_state(each, view)
            _torchs("_composable_state", "_module_state_mapping")[each] = ref(view)
    return view


class ParamView:
    """One parameter, in its current forms."""

    def __init__(self, param: ManagedParameter):
        self._param = param

    @property
    def sharded_param(self) -> nn.Parameter:
        """The DTensor."""
        return self._param.sharded

    @property
    def unsharded_param(self) -> torch.Tensor | None:
        """The gathered parameter; None before the first gather."""
        return self._param.unsharded

    _unsharded_param = unsharded_param


def _step(name: str) -> property:
    """A backward step of the unit, which may be replaced."""

    def replace_step(view: "GroupView", step: Callable[..., None]) -> None:
        vars(view._unit).pop(name, None)
        if step != getattr(view._unit, name):  # not for its own method, which would refer to the unit
            setattr(view._unit, name, step)

    return property(lambda view: getattr(view._unit, name), replace_step)


class GroupView:
    """All parameters of a unit, from all its groups."""

    def __init__(self, unit: Unit):
        self._unit = unit

    @cached_property
    def mesh_info(self) -> Any:
        """The mesh and its axes, as an object of torch's."""
        roles = self._unit.groups[0].roles
        axes = {"shard_mesh_dim": roles.shard_axis, "replicate_mesh_dim": roles.replicate_axis}
        kind = "HSDP" if None not in axes.values() else "FSDP" if roles.shard_axis is not None else "DDP"
        return _torchs("fsdp._fully_shard._fsdp_common", f"{kind}MeshInfo")(roles.mesh, **axes)

    @property
    def fsdp_params(self) -> list[ParamView]:
        """The parameters."""
        return [ParamView(param) for group in self._unit.groups for param in group.params]

    @property
    def reshard_after_backward(self) -> bool:
        """As `set_reshard_after_backward` sets it."""
        return self._unit.settings.reshard_after_backward

    @reshard_after_backward.setter
    def reshard_after_backward(self, value: bool) -> None:
        self._set("reshard_after_backward", value)

    @property
    def post_forward_mesh_info(self) -> Any:
        """`mesh_info`, or None if the unit stays unsharded after forward. Setting it sets that."""
        return self.mesh_info if self._unit.settings.reshard_after_forward is not False else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        self._set("reshard_after_forward", info is not None)

    def _set(self, name: str, value: bool) -> None:
        module: Any = self._unit.modules[0]
        getattr(module, f"set_{name}")(value, recurse=False)

    pre_backward = _step("pre_backward")
    post_backward = _step("post_backward")


class StateView(StageState):
    """The state of a sharded module while installed: torch's checks take it for an `FSDPState`."""

    __class__ = property(lambda self: _torchs("fsdp._fully_shard._fsdp_state", "FSDPState"))

    def __init__(self, unit: Unit):
        super().__init__(unit)
        self._fsdp_param_group = GroupView(unit) if unit.groups else None
        self._pre_forward = pre_forward
        self._post_forward = post_forward
        self._pre_forward_hook_handle: Any = _Hooks(unit, "_forward_pre_hooks", pre_forward)
        self._post_forward_hook_handle: Any = _Hooks(unit, "_forward_hooks", post_forward)

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        return [self._fsdp_param_group] if self._fsdp_param_group is not None else []


class _Hooks:
    """The handle of a hook that `fully_shard` registered on the modules of a unit."""

    def __init__(self, unit: Unit, registry: str, hook: Callable[..., Any]):
        self._unit = unit
        self._registry = registry
        self._hook = hook

    def remove(self) -> None:
        """Remove the hook from all modules of the unit."""
        for module in self._unit.modules:
            hooks: dict[int, Any] = vars(module)[self._registry]
            for key in [key for key, hook in hooks.items() if hook is self._hook]:
                del hooks[key]


def _torchs(module: str, name: str) -> Any:
    """A private object of torch's, which clients look at."""
    return vars(sys.modules[f"torch.distributed.{module}"])[name]
