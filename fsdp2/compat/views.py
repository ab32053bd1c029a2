"""A unit with the interface of torch's FSDP state, for clients that use `_get_fsdp_state()`, `fully_shard.state` or
torch's registry of states. Layer: compat.

NeMo Automodel reads the policy, axolotl and verl change when a unit reshards. Only the attributes that these clients
use exist; this is not a general view of a unit.
"""

import sys
from functools import cached_property
from typing import Any
from weakref import ref

from torch import nn

from fsdp2._torch.shared import fully_shard_state, set_fully_shard_state
from fsdp2.extras.pipelining import StageState
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.runtime.unit import Unit, unit_for

__all__ = ["StateView", "state_view"]


def state_view(module: nn.Module) -> "StateView":
    """The view of the unit that manages `module`, which must be sharded. It is the same object in each call and for
    each module of the unit, and is registered with torch."""
    view = fully_shard_state(module)
    if not isinstance(view, StateView):
        unit = unit_for(module)
        view = StateView(unit)
        for each in unit.modules:
            set_fully_shard_state(each, view)
            _torchs("_composable_state", "_module_state_mapping")[each] = ref(view)
    return view


class GroupView:
    """The parameters of a unit."""

    def __init__(self, unit: Unit):
        self._unit = unit

    @cached_property
    def mesh_info(self) -> Any:
        """The mesh and its axes, as torch's object."""
        roles = self._unit.groups[0].roles
        axes = {"shard_mesh_dim": roles.shard_axis, "replicate_mesh_dim": roles.replicate_axis}
        kind = "HSDP" if None not in axes.values() else "FSDP" if roles.shard_axis is not None else "DDP"
        return _torchs("fsdp._fully_shard._fsdp_common", f"{kind}MeshInfo")(roles.mesh, **axes)

    # Both may be set. For a unit that stays unsharded after forward, the mesh is None.
    reshard_after_backward = property(
        lambda self: self._unit.settings.reshard_after_backward,
        lambda self, value: self._unit.modules[0].set_reshard_after_backward(value, recurse=False),
    )
    post_forward_mesh_info = property(
        lambda self: None if self._unit.settings.reshard_after_forward is False else self.mesh_info,
        lambda self, info: self._unit.modules[0].set_reshard_after_forward(info is not None, recurse=False),
    )


class StateView(StageState):
    """The state of a sharded module while compat is installed: torch's checks accept it as an `FSDPState`."""

    __class__ = property(lambda self: _torchs("fsdp._fully_shard._fsdp_state", "FSDPState"))

    def __init__(self, unit: Unit):
        super().__init__(unit)
        self._fsdp_param_group = GroupView(unit) if unit.groups else None

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy


def _torchs(module: str, name: str) -> Any:
    """A private object of torch that clients use."""
    return vars(sys.modules[f"torch.distributed.{module}"])[name]
