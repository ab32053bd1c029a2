"""A unit as torch's private memory tracker sees a sharded module: through `_get_fsdp_state()`. Layer: compat.

`torch.distributed._tools.fsdp2_mem_tracker` takes snapshots around the forward hooks of each sharded module, and around
its `pre_backward` and `post_backward`: it removes the hooks, registers its own that call the former ones, and replaces
the two methods. Only the attributes that it uses are here; this is not a general view of a unit.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fsdp2.runtime.attach import post_forward, pre_forward
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.unit import Unit, unit_of

__all__ = ["StateView", "state_view"]

_views: WeakKeyDictionary[Unit, "StateView"] = WeakKeyDictionary()


def state_view(module: nn.Module) -> "StateView":
    """The view of the unit that manages `module`, which must be sharded; the same object at each call."""
    unit = unit_of(module)
    assert unit is not None
    if unit not in _views:
        _views[unit] = StateView(unit)
    return _views[unit]


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


class GroupView:
    """All parameters of a unit, from all its groups, and its two backward steps, which may be replaced."""

    def __init__(self, unit: Unit):
        self._unit = ref(unit)

    @property
    def fsdp_params(self) -> list[ParamView]:
        """The parameters."""
        unit = self._unit()
        return [ParamView(param) for group in unit.groups for param in group.params] if unit is not None else []

    def _step(self, name: str) -> Any:
        return getattr(self._unit(), name)

    def _replace_step(self, name: str, step: Callable[..., None]) -> None:
        unit = self._unit()
        assert unit is not None
        vars(unit).pop(name, None)
        if step != getattr(unit, name):  # not for its own method, which would keep the unit alive
            setattr(unit, name, step)

    pre_backward = property(
        lambda self: self._step("pre_backward"), lambda self, step: self._replace_step("pre_backward", step)
    )
    post_backward = property(
        lambda self: self._step("post_backward"), lambda self, step: self._replace_step("post_backward", step)
    )


class StateView:
    """What `_get_fsdp_state()` returns while installed."""

    def __init__(self, unit: Unit):
        self._fsdp_param_group = GroupView(unit) if unit.groups else None
        self._pre_forward = pre_forward
        self._post_forward = post_forward
        self._pre_forward_hook_handle: Any = _Hooks(unit, "_forward_pre_hooks", pre_forward)
        self._post_forward_hook_handle: Any = _Hooks(unit, "_forward_hooks", post_forward)


class _Hooks:
    """The handle of a hook that `fully_shard` registered on the modules of a unit."""

    def __init__(self, unit: Unit, registry: str, hook: Callable[..., Any]):
        self._unit = ref(unit)
        self._registry = registry
        self._hook = hook

    def remove(self) -> None:
        """Remove the hook from all modules of the unit."""
        unit = self._unit()
        for module in unit.modules if unit is not None else ():
            hooks: dict[int, Any] = vars(module)[self._registry]
            for key in [key for key, hook in hooks.items() if hook is self._hook]:
                del hooks[key]
