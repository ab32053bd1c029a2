"""`Steady`: has nothing been replaced since the last step? Layer: optim, below local.

A local optimizer keeps merged tensors from step to step, and the user may replace a parameter's storage, a gradient or
a state at any time. Looking at hundreds of parameters one at a time takes longer than stepping them, so the runs of a
param group are checked together, a question for all of them at a time. If any answer differs, each run is asked by
itself (`SteppedRun.enter`).
"""

from collections.abc import Callable, Mapping, Sequence
from operator import sub
from sys import getrefcount
from typing import Any

import torch

from fsdp2._torch import base_of, grad_of, local_of, spec_of
from fsdp2.optim.run import SteppedRun, identical, is_current, joined_grad, values_of

__all__ = ["Steady", "is_referred_to"]

_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr

# What `sys.getrefcount` tells of an object that one list holds. A state is in the optimizer's and in a run besides.
_HELD_ONCE = next(map(getrefcount, [object()]))


class Steady:
    """The runs of a param group, all of which have gradients.

    Args:
        runs: they have begun, or were entered.

    Attributes:
        written: what a step changes: the parameters, and their local tensors.
    """

    def __init__(self, runs: Sequence[SteppedRun]):
        self._runs = runs
        self._params = [param for run in runs for param in run.params]
        self._bases = [base for run in runs for base in run.bases]
        self.written = [*self._params, *self._bases]
        self._pointers = list(map(_address_of, self._bases))
        self._specs = [spec for run in runs for spec in run.grad_specs]
        self._offsets = [offset for run in runs for offset in run.grad_offsets]
        sizes = [len(run.params) for run in runs]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._first_of = [start for start, size in zip(self._starts, sizes, strict=True) for _ in range(size)]

    @staticmethod
    def of(runs: Sequence[SteppedRun]) -> "Steady | None":
        """None if some have nothing to step: next time it may be others."""
        fits = bool(runs) and all(run.has_grad and len(run.grad_specs) == len(run.params) for run in runs)
        return Steady(runs) if fits else None

    def enter(self, states: Mapping[Any, Any] | None) -> bool:
        """Read this step's gradients into the runs, if nothing else has changed. Otherwise returns False.

        Args:
            states: the optimizer's state, to be compared with that of the last step; None if nobody can have changed
                it.
        """
        if not identical(map(local_of, self._params), self._bases):
            return False
        if list(map(_address_of, self._bases)) != self._pointers:
            return False
        if not all(is_current(counter) for run in self._runs for counter in run.counters):
            return False
        if states is not None and not self._has_same(states):
            return False
        grads = list(map(grad_of, self._params))
        try:
            if not identical(map(spec_of, grads), self._specs):
                return False
            locals_ = list(map(local_of, grads))
        except AttributeError:  # there is none, or one that is no DTensor
            return False
        addresses = list(map(_address_of, locals_))
        if list(map(sub, addresses, map(addresses.__getitem__, self._first_of))) != self._offsets:
            return False
        joined = [
            locals_[start]
            if len(run.params) == 1
            else joined_grad(run.local, base_of(locals_[start]), addresses[start])
            for run, start in zip(self._runs, self._starts, strict=True)
        ]
        for run, grad in zip(self._runs, joined, strict=True):
            if grad is None:
                return False
            run.set_grad(grad)
        return True

    def _has_same(self, states: Mapping[Any, Any]) -> bool:
        outers = [outer for run in self._runs for outer in run.outers]
        values = [value for run in self._runs for value in run.values]
        return identical(map(states.get, self._params), outers) and identical(values_of(outers), values)


def is_referred_to(owner: Mapping[str, Any], runs: Sequence[SteppedRun]) -> bool:
    """Whether somebody else than the optimizer and its `runs` holds its state, or that of one of their parameters.
    Only who holds them can replace what is in them.

    Args:
        owner: the optimizer's attributes, of which ``state`` is one.
    """
    outers = [outer for run in runs for outer in run.outers]
    return _references(owner) > _NOBODY_ELSE or any(count > _HELD_ONCE + 2 for count in map(getrefcount, outers))


def _references(owner: Mapping[str, Any]) -> int:
    return next(map(getrefcount, [owner["state"]]))


_NOBODY_ELSE = _references({"state": {}})
