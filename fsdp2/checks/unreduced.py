"""Detects the use of sharded gradients while others are still unreduced. Layer: checks.

A backward with gradient sync or all-reduce turned off, one that is not the last, or one that will be finalised manually
leaves gradients where no optimizer sees them. A step, a clip or a `zero_grad` is then a silent mistake: a program that
never turns reductions on again trains nothing. Roots whose last backward left gradients are listed here, so that the
check costs almost nothing if there are none.
"""

import warnings
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from fsdp2._torch import backward_is_running
from fsdp2.checks.step_hook import when_gradients_are_final
from fsdp2.errors import OrderError
from fsdp2.extras.finalization import is_finalizing, is_waited_for, leaves_gradients
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit

_waiting: "WeakSet[Unreduced]" = WeakSet()


def watch_root(step: Step) -> None:
    """Watch the gradients of a new root."""
    unreduced = Unreduced(step)
    step.hooks.after_forward.append(unreduced.after_forward)
    step.hooks.reached_in_part.append(unreduced.reached_in_part)
    step.hooks.before_last_reductions.append(unreduced.after_backward)
    step.hooks.on_reset.append(unreduced.reset)


class Unreduced:
    """The unreduced gradients of one root, whose hooks keep it alive."""

    def __init__(self, step: Step) -> None:
        self._step = ref(step)
        self._is_partial = False  # the running backward computes only some gradients
        self._has_reduced = False  # gradients of this root were reduced at least once
        self._expects = False  # a forward ran with gradients, and none has arrived since
        self._left_by: WeakKeyDictionary[Unit, str] = WeakKeyDictionary()  # unit -> the call that left its gradients
        self._num_backwards = 0
        self._used_after = 0  # the number of backwards when gradients were last used while some were unreduced
        self._num_uses = 0
        self._has_warned = False

    def after_forward(self) -> None:
        """A forward ran, and a backward may follow."""
        if torch.is_grad_enabled():
            self._expects = True
            _waiting.add(self)

    def reached_in_part(self, unit: Unit) -> None:
        """Backward reaches `unit`. If the unit sees the end of its backward, only some gradients are computed."""
        self._is_partial = self._is_partial or unit.state.sees_end

    def after_backward(self) -> None:
        """A backward has ended, or is finalised."""
        step = self._step()
        assert step is not None
        self._num_backwards += 1
        units, is_finalized = step.units, is_finalizing(step)
        is_partial, self._is_partial = self._is_partial, False
        if is_partial:
            self._warn_of_partial(units)
        if self._expects:
            self._expects = not any(map(_has_arrived, units))
        left = [unit for unit in units if not (step.is_last and unit.settings.ends_step)]
        causes = {unit: _what_leaves(unit, leaves_gradients(step)) for unit in left}
        self._left_by.clear()
        self._left_by.update({unit: cause for unit, cause in causes.items() if cause})
        if not self._has_reduced:
            reduced = [unit for unit in units if unit not in self._left_by]
            self._has_reduced = any(is_finalized or _has_arrived(unit) for unit in reduced)
        (_waiting.add if causes or self._expects or is_finalized else _waiting.discard)(self)

    def reset(self) -> None:
        """Unreduced gradients were dropped."""
        self._left_by.clear()
        self._is_partial = False

    def _warn_of_partial(self, units: list[Unit]) -> None:
        """Warn, once, if a backward with `inputs` gave gradients to some units, but not to all that ran."""
        arrived = [unit for unit in units if _has_arrived(unit)]
        if not arrived or any(unit.settings.reshard_after_forward for unit in arrived):
            return
        ran = [unit for unit in units if unit not in arrived and unit.state.first_node >= units[0].state.first_node]
        missed = [unit.fqn for unit in ran if any(any(group.gradients.trainable) for group in unit.groups)]
        if missed:
            names = ", ".join(f"'{fqn}'" for fqn in missed[:5])
            self._warn(
                f"backward(inputs=...) gave gradients to parameters that were unsharded, and none to those of {names}, "
                "which were not. Call loss.backward(), without inputs."
            )

    def check(self, call: str, params: set[int], is_read: bool) -> None:
        """`call` is made with parameters of these ids: warn, once, if some of their gradients are unreduced.

        Args:
            is_read: the call reads gradients, instead of only clearing them. Counts once per backward.

        Raises:
            OrderError: gradients are read for the second time while some are unreduced, and none of this root was ever
                reduced.
        """
        step = self._step()
        if step is None:
            return
        found = self._find(step, params)
        if found:
            if is_read and self._used_after != self._num_backwards:
                self._used_after = self._num_backwards
                self._num_uses += 1
                if self._num_uses > 1 and not self._has_reduced:
                    raise OrderError(
                        f"{_message(call, found)} No gradient has reached a sharded parameter yet: nothing is trained."
                    )
            self._warn(_message(call, found))
        elif is_read and self._expects and _lacks_gradients(step.units, params):
            self._warn(_NO_GRADIENTS.format(call=call))

    def _find(self, step: Step, ids: set[int]) -> list[tuple[str, str]]:
        """The units that have unreduced gradients of parameters with these ids, and the call that left them."""
        found = {unit.fqn: cause for unit, cause in self._left_by.items() if _has_unreduced(unit, ids)}
        late = "a handle that was not waited for" if is_waited_for(step) else "set_is_last_backward(False)"
        for each in step.reductions:
            if any(param.is_among(ids) for param in each.params):
                found.setdefault(each.fqn, late)
        return list(found.items())

    def _warn(self, message: str) -> None:
        """Warn once."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=5)


def _has_arrived(unit: Unit) -> bool:
    """Whether the running backward has given any parameter a gradient."""
    return any(group.gradients.were_taken or group.gradients.arrived for group in unit.groups)


def _what_leaves(unit: Unit, is_manual: bool) -> str:
    """The call because of which this backward leaves gradients of `unit` unreduced; "" for none."""
    if is_manual:
        return "set_manual_backward_finalization(True) without finalize_backward() since"
    if unit.state.settings.ends_step:
        return ""
    if not unit.settings.requires_gradient_sync:
        return "set_requires_gradient_sync(False)"
    return "set_is_last_backward(False)" if unit.settings.requires_all_reduce else "set_requires_all_reduce(False)"


def _has_unreduced(unit: Unit, ids: set[int]) -> bool:
    """Whether parameters with these ids have gradients that are unsharded or wait for an all-reduce."""
    pairs = [(group, param) for group in unit.groups for param in group.params if param.is_among(ids)]
    wholes = [param.unsharded for _, param in pairs if param.unsharded is not None]
    waits = any(param in group.gradients.partials for group, param in pairs)
    return waits or any(whole.grad is not None for whole in wholes)


def _lacks_gradients(units: Sequence[Unit], ids: set[int]) -> bool:
    """Whether there are trainable sharded parameters with these ids, and none has a gradient."""
    params = [param.sharded for unit in units for param in unit.params if param.is_among(ids)]
    trainable = [param for param in params if param.requires_grad]
    return bool(trainable) and all(param.grad is None for param in trainable)


_NO_GRADIENTS = (
    "{call}: a forward of a sharded model ran with gradients, and none of these parameters has one. Call "
    "loss.backward(): backward(inputs=...) and torch.autograd.grad do not reach sharded parameters, since the graph "
    "has the unsharded ones."
)


def _message(call: str, found: list[tuple[str, str]]) -> str:
    units = ", ".join(f"'{fqn}'" if fqn else "(root)" for fqn, _ in found[:5]) + (", ..." if len(found) > 5 else "")
    causes = " and ".join(sorted({cause for _, cause in found}))
    return (
        f"{call}: gradients of {units} were not reduced, because of {causes}. {call} uses reduced ones, the .grad of "
        "sharded parameters; these wait for the next backward that reduces. Call set_requires_gradient_sync(True) "
        "and set_is_last_backward(True) before the last backward of a step; to drop gradients that wait, call "
        "reset_iter_state() on the root."
    )


def check_reduced(call: str, params: Iterable[torch.Tensor], is_read: bool = True) -> None:
    """Warn, once per root, if gradients of sharded `params` are unreduced while `call` uses the existing ones.

    Raises:
        OrderError: see `Unreduced.check`.
    """
    if not _waiting or backward_is_running():  # an optimizer that runs in backward steps complete gradients
        return
    ids = {id(param) for param in params}
    for unreduced in list(_waiting):
        unreduced.check(call, ids, is_read)


def check_zero_grad(module: nn.Module) -> None:
    """`zero_grad` of a sharded module has been called."""
    check_reduced("zero_grad", module.parameters(), is_read=False)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    if _waiting:
        params = (param for group in optimizer.param_groups for param in group["params"])
        check_reduced(f"{type(optimizer).__name__}.step", params)


when_gradients_are_final(_check_step)
