"""Manual finalisation of gradients, as in torch 2.15: `FSDPModule.set_manual_backward_finalization` and
`finalize_backward`. Layer: extras.

::

    forward -> backward -> forward -> backward -> finalize_backward()                                gradients complete
                                                  finalize_backward(async_op=True) -> handle.wait()  gradients complete

Once a backward in this mode has left its gradients unreduced, all later ones do the same until `finalize_backward`,
even if the mode is turned off.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from fsdp2._torch import backward_is_running
from fsdp2.errors import OrderError
from fsdp2.runtime import hooks
from fsdp2.runtime.reduction import InFlight
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit, unit_for

_MODE = "manual_finalization"  # in `UnitSettings.features` of a root

# Called with the step before gradients are finalised; may raise.
before_finalize: list[Callable[[Step], None]] = []


class GradientReductionHandle:
    """Reductions in flight, from ``module.finalize_backward(async_op=True)``."""

    def __init__(self, step: Step | None):
        self._step = None if step is None else ref(step)  # None: there was nothing to reduce
        self._is_void = False

    def wait(self) -> None:
        """Complete the sharded gradients. A second call does nothing.

        Raises:
            OrderError: `reset_iter_state` was called since.
        """
        if self._is_void:
            raise OrderError("this handle's reductions were discarded by reset_iter_state()")
        step = None if self._step is None else self._step()
        if step is not None and _waiting.get(step.reductions) is self:
            del _waiting[step.reductions]
            step.finish_reductions()

    def is_of(self, step: Step) -> bool:
        """Whether `step` was finalised."""
        return self._step is not None and self._step() is step

    def is_alive(self) -> bool:
        """Whether its root still exists, so that it can be waited for."""
        return self._step is not None and self._step() is not None

    def discard(self) -> None:
        """Its reductions were discarded."""
        self._is_void = True


# The handle that must be waited for, by the reductions, which several roots may share.
_waiting: WeakKeyDictionary[InFlight, GradientReductionHandle] = WeakKeyDictionary()
_left: WeakSet[Step] = WeakSet()  # the last backward left its gradients
_finalizing: list[Step] = []


def is_manual(root: Unit) -> bool:
    """Whether the mode is on."""
    return _MODE in root.settings.features


def leaves_gradients(step: Step) -> bool:
    """Whether the running or last backward leaves its gradients until they are finalised."""
    return step in _left


def is_finalizing(step: Step) -> bool:
    """Whether gradients are being finalised."""
    return step in _finalizing


def is_waited_for(step: Step) -> bool:
    """Whether a handle for reductions has not been waited for."""
    handle = _waiting.get(step.reductions)
    return handle is not None and handle.is_alive()


def _set(module: Any, enable: bool) -> None:
    unit = unit_for(module)
    if unit.step is not None and not unit.step.is_provisional and unit.step.root() is not unit:
        raise OrderError(f"set_manual_backward_finalization: '{unit.fqn}' is not the root; call it on that")
    features = {name: value for name, value in unit.settings.features.items() if name != _MODE}
    unit.settings = replace(unit.settings, features={**features, _MODE: True} if enable else features)


def _finalize(module: Any, is_async: bool) -> GradientReductionHandle | None:
    unit, step = unit_for(module), unit_for(module).step
    if step is not None and step.root() is not unit:
        raise OrderError(f"finalize_backward: '{unit.fqn}' is not the root; call it on that")
    where = f"finalize_backward of '{unit.fqn}'"
    if not (is_manual(unit) or (step is not None and step in _left)):
        raise OrderError(f"{where}: call set_manual_backward_finalization(True) before the backward")
    if step is not None:
        if backward_is_running() or step.end is not None:
            raise OrderError(f"{where}: a backward is running; call it after that has returned")
        if step.awaits_backward:
            raise OrderError(f"{where}: a forward has run, but not its backward; call it after the last backward")
        _check_nobody_waits(step, where)
    if step is None or step not in _left:
        return GradientReductionHandle(None) if is_async else None
    for hook in before_finalize:
        hook(step)
    for each in step.units:
        _check_no_partials(each)
    _left.discard(step)
    _finalizing.append(step)
    try:
        step.finish_units()
    finally:
        _finalizing.remove(step)
    if not is_async:
        step.finish_reductions()
        return None
    _waiting[step.reductions] = handle = GradientReductionHandle(step)
    return handle


def _check_nobody_waits(step: Step, where: str) -> None:
    if is_waited_for(step):
        raise OrderError(
            f"{where}: gradients of the last finalize_backward(async_op=True) are still being reduced; call wait() "
            "on the handle that it returned"
        )


def _check_no_partials(unit: Unit) -> None:
    """Raise if gradients wait for an all-reduce, or would wait afterwards."""
    for group in unit.groups:
        partial_fqns = [param.fqn for param in group.gradients.partials]
        off = group.roles.replicate_group is not None and not unit.settings.requires_all_reduce
        if partial_fqns or off:
            raise OrderError(
                f"finalize_backward: unit '{unit.name}' has all-reduce turned off, or gradients that wait for one "
                f"({partial_fqns}); call set_requires_all_reduce(True) before the first backward"
            )


def _follow_root(step: Step) -> None:
    for unit in step.units[1:]:
        if is_manual(unit):
            raise OrderError(
                f"set_manual_backward_finalization was called on '{unit.fqn}', which is not the root; call it on the "
                "outermost sharded module"
            )
    weak = ref(step)
    step.hooks.before_forward.insert(0, partial(_before_forward, weak))
    step.hooks.settings_chosen.append(partial(_settings_chosen, weak))
    step.hooks.on_reset.insert(0, partial(_reset, weak))


def _before_forward(weak: "ref[Step]", *_: object) -> None:
    if _waiting and (step := weak()) is not None:
        _check_nobody_waits(step, f"forward of '{step.units[0].fqn}'")


def _settings_chosen(weak: "ref[Step]") -> None:
    step = weak()
    assert step is not None
    if is_finalizing(step):
        step.is_last = True
    elif is_manual(step.units[0]) or step in _left:
        _left.add(step)
        step.is_last = False
    else:
        return
    for unit in step.units:
        settings = unit.settings.in_backward(step.is_last)
        sync = settings.requires_gradient_sync and step.is_last
        unit.state.settings = replace(settings, requires_gradient_sync=sync)


def _reset(weak: "ref[Step]") -> None:
    step = weak()
    assert step is not None
    _left.discard(step)
    handle = _waiting.get(step.reductions)
    if handle is not None and handle.is_alive() and not handle.is_of(step):
        raise OrderError("reset_iter_state: another root's finalize_backward(async_op=True) is not finished; wait()")
    if handle is not None:
        handle.discard()
        del _waiting[step.reductions]


hooks.setters["set_manual_backward_finalization"] = _set
hooks.setters["finalize_backward"] = _finalize
hooks.root_made.append(_follow_root)
