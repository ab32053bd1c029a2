"""Detects the use of sharded gradients while others still wait to be reduced. Layer: checks.

A backward with gradient sync or all-reduce turned off, one that is not the last, or one that will be finalised by hand
leaves gradients where no optimizer sees them. A step, a clip or a `zero_grad` is then a silent mistake: a program that
never turns reductions on again trains nothing. Roots whose last backward left gradients are listed here, so that the
check costs almost nothing if there are none.
"""

import warnings
from collections.abc import Callable, Iterable
from weakref import WeakMethod, WeakSet

import torch

from fsdp2._torch import backward_is_running
from fsdp2.checks.step_hook import when_gradients_are_final
from fsdp2.errors import OrderError

_waiting: "WeakSet[Unreduced]" = WeakSet()


class Unreduced:
    """The state of one root's unreduced gradients.

    Args:
        find: a method, held weakly, that returns the units that have unreduced gradients of parameters with these ids,
            and the call that left them.
        lacks: a method, held weakly, that returns whether sharded parameters with these ids have no gradient at all.

    Attributes:
        has_reduced: whether a reduction of this root into sharded gradients has been issued.
        expects: a forward ran with gradients, and none has come since.
    """

    def __init__(self, find: Callable[[set[int]], list[tuple[str, str]]], lacks: Callable[[set[int]], bool]) -> None:
        self.has_reduced = False
        self.expects = False
        self._find = WeakMethod(find)
        self._lacks = WeakMethod(lacks)
        self._some_wait = False
        self._num_backwards = 0
        self._used_after = 0  # the number of backwards when gradients were last used while some waited
        self._num_uses = 0
        self._has_warned = False

    def after_forward(self) -> None:
        """A forward ran, and a backward may follow."""
        self.expects = True
        _waiting.add(self)

    def after_backward(self, some_wait: bool) -> None:
        """A backward has ended, or was finalised. `some_wait`: it may have left gradients."""
        self._num_backwards += 1
        self._some_wait = some_wait
        (_waiting.add if some_wait or self.expects else _waiting.discard)(self)

    def after_partial_backward(self, left_out: list[str]) -> None:
        """Warn, once, if a backward for some inputs gave gradients to some units, and not to those of `left_out`."""
        if left_out:
            names = ", ".join(f"'{fqn}'" for fqn in left_out[:5])
            self._warn(
                f"backward(inputs=...) gave gradients to parameters that were unsharded, and none to those of {names}, "
                "which were not. Call loss.backward(), without inputs."
            )

    def check(self, call: str, params: set[int], is_read: bool) -> None:
        """`call` is made with parameters of these ids: warn, once, if some of their gradients are unreduced.

        Args:
            is_read: the call reads gradients, instead of only clearing them. Counts once per backward.

        Raises:
            OrderError: gradients are read while some are unreduced for the second time, and none of this root was ever
                reduced.
        """
        find, lacks = self._find(), self._lacks()
        found = find(params) if self._some_wait and find is not None else []
        if found:
            if is_read and self._used_after != self._num_backwards:
                self._used_after = self._num_backwards
                self._num_uses += 1
                if self._num_uses > 1 and not self.has_reduced:
                    raise OrderError(
                        f"{_message(call, found)} No gradient has reached a sharded parameter yet: nothing is trained."
                    )
            self._warn(_message(call, found))
        elif is_read and self.expects and lacks is not None and lacks(params):
            self._warn(_NO_GRADIENTS.format(call=call))

    def _warn(self, message: str) -> None:
        """Warn once."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=5)


_NO_GRADIENTS = (
    "{call}: a forward of a sharded model ran with gradients, and none of these parameters has one. Call "
    "loss.backward(): backward(inputs=...) and torch.autograd.grad do not reach sharded parameters, since the graph "
    "has the unsharded ones."
)


def _message(call: str, found: list[tuple[str, str]]) -> str:
    units = ", ".join(f"'{fqn}'" if fqn else "(root)" for fqn, _ in found[:5]) + (", ..." if len(found) > 5 else "")
    causes = " and ".join(sorted({cause for _, cause in found}))
    return (
        f"{call}: gradients of {units} were not reduced, because of {causes}. {call} is for reduced ones, in the .grad "
        "of sharded parameters; these wait for the next backward that reduces. Call set_requires_gradient_sync(True) "
        "and set_is_last_backward(True) before the last backward of a step; to drop gradients that wait, call "
        "reset_iter_state() on the root."
    )


def check_reduced(call: str, params: Iterable[torch.Tensor], is_read: bool = True) -> None:
    """Warn, once per root, if gradients of sharded `params` wait to be reduced while `call` uses the existing ones.

    Raises:
        OrderError: see `Unreduced.check`.
    """
    if not _waiting or backward_is_running():  # an optimizer that runs in backward steps parameters that are ready
        return
    ids = {id(param) for param in params}
    for unreduced in list(_waiting):
        unreduced.check(call, ids, is_read)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    if _waiting:
        params = (param for group in optimizer.param_groups for param in group["params"])
        check_reduced(f"{type(optimizer).__name__}.step", params)


when_gradients_are_final(_check_step)
