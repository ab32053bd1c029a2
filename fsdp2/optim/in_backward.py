"""Steps each unit within backward, so that the gradients of only a few units exist at a time. Layer: optim.

::

    backward of unit 3    last gradient -> reduce-scatter
    backward of unit 2    reduce-scatter of 3 is done -> step 3, free its gradients;  last gradient -> reduce-scatter
    backward of unit 1    reduce-scatter of 2 is done -> step 2, free its gradients;  ...

The optimizer stays one object, with one state and the user's param groups. While a unit is stepped, its groups hold
only that unit's parameters.

Like "optimizer in the backward pass" of torch's tutorials, but by unit instead of by parameter:
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch

from fsdp2._torch.optim import accept_scaler, forget_scaler, take_from_scaler
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.optim.flats import identical
from fsdp2.optim.local import LocalOptimizer
from fsdp2.optim.matrix import MatrixOptimizer
from fsdp2.optim.units import units_with
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.unit import Unit

__all__ = ["StepInBackward", "check_not_stepped_in_backward", "step_in_backward"]

Clip = Callable[[list[torch.Tensor]], object]

_alive: "WeakSet[StepInBackward]" = WeakSet()


def step_in_backward(optimizer: torch.optim.Optimizer, *, clip: Clip | None = None) -> "StepInBackward":
    """Let backward step the optimizer: each unit's parameters as soon as their gradients are reduced. The gradients are
    freed right after, so that those of one or two units exist at a time instead of those of the whole model.

    The result is bitwise that of a step after backward. The training loop may stay as it is: ``optimizer.step()`` then
    steps only parameters that no unit manages, and ``zero_grad()`` finds nothing. Schedulers, param groups, step hooks
    (which now run for each unit), ``state_dict`` and checkpoints work as before. Every backward that completes the
    sharded gradients steps. To accumulate, call ``set_requires_gradient_sync(False)`` or
    ``set_is_last_backward(False)`` before the other backwards: their gradients are added, and the last one steps.

    Call it after `fully_shard`, on every rank. The model may have several optimizers, each with its own parameters.

    Args:
        optimizer: any that steps each parameter independently and keeps its state in ``optimizer.state[param]``; with
            `local_optimizer` a unit is stepped as one tensor.
        clip: called before each step with the unit's parameters that have gradients, to change these in place. It is
            called for the same parameters in the same order on every rank, so it may communicate. The norm of the whole
            model's gradients is not known at that time; see the example for what is possible.

    Returns:
        An object whose ``remove()`` undoes the call.

    Raises:
        ArgumentError: no unit manages any of its parameters, backward steps it already, or it is LBFGS or a
            `MatrixOptimizer`. In backward: its step changed an option of a param group, so it must step all parameters
            at once.
        OrderError: (later) `fsdp2.clip_grad_norm_` on parameters that were stepped already; a step by `GradScaler`,
            which can skip a step only before it; a backward that needs a unit's parameters after their step.

    Example::

        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
        fsdp2.step_in_backward(optimizer, clip=lambda params: fsdp2.clip_grad_norm_(params, 1.0))  # each unit's norm
        # or clip=lambda params: torch.nn.utils.clip_grad_value_(params, 1.0)
        for batch in batches:
            model(batch).backward()
            scheduler.step()
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("step_in_backward: LBFGS steps all parameters together; step it after backward")
    if isinstance(optimizer, MatrixOptimizer):
        raise ArgumentError(
            "step_in_backward: the matrices of MatrixOptimizer travel in buckets of many units; step it after backward"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    units = units_with(params)
    if not units:
        raise ArgumentError(
            f"step_in_backward: none of the {len(params)} parameters of this {type(optimizer).__name__} is a sharded "
            "parameter of a unit. Call fully_shard first and make the optimizer after it, or call adopt_optimizer."
        )
    if any(stepper.optimizer is optimizer for unit in units for stepper in _steppers_of(unit)):
        raise ArgumentError(f"step_in_backward: backward steps this {type(optimizer).__name__} already")
    return StepInBackward(optimizer, clip, units)


def check_not_stepped_in_backward(call: str, params: Iterable[torch.Tensor]) -> None:
    """Call it before gradients of `params` are clipped together.

    Raises:
        OrderError: a backward stepped some of them already.
    """
    if not _alive:
        return
    ids = {id(param) for param in params}
    for stepper in _alive:
        if not stepper.is_stepping and any(id(param) in ids for param in stepper.params()):
            raise OrderError(
                f"{call}: backward has stepped these parameters and freed their gradients (step_in_backward), before "
                "the norm of all gradients was known. Clip each unit as it is stepped: step_in_backward(optimizer, "
                "clip=lambda params: fsdp2.clip_grad_norm_(params, max_norm)). For the norm of all gradients step "
                "after backward, without step_in_backward; fsdp2.offload_optimizer saves device memory too."
            )


@dataclass
class _Part:
    """The parameters of one reduction that the optimizer holds.

    Attributes:
        sharded: all parameters of the reduction.
        lists: the optimizer's lists of parameters, and their lengths.
        members: the parameters to step, for each param group.
        flats: the `flats` of a `LocalOptimizer` after its last step of this part.
    """

    sharded: list[torch.Tensor]
    lists: list[tuple[int, int]]
    members: list[list[torch.Tensor]]
    flats: Any = None


class StepInBackward:
    """Steps one optimizer in backward; made by `step_in_backward`.

    Attributes:
        optimizer: the optimizer.
        is_stepping: a unit is being clipped and stepped now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: Clip | None, units: Sequence[Unit]):
        self.optimizer = optimizer
        self.is_stepping = False
        self._clip = clip
        self._parts: dict[ManagedParameter, _Part] = {}  # by the first parameter of the reduction
        self._units: WeakSet[Unit] = WeakSet(units)
        self._hook = optimizer.register_step_pre_hook(_refuse_scaler)
        self._accepted = accept_scaler(optimizer)
        for unit in units:
            unit.settings = replace(unit.settings, when_reduced=(*unit.settings.when_reduced, self))
        _alive.add(self)

    def remove(self) -> None:
        """Let backward leave the gradients to ``optimizer.step()`` again. Not while a backward runs."""
        for unit in self._units:
            others = tuple(each for each in unit.settings.when_reduced if each is not self)
            unit.settings = replace(unit.settings, when_reduced=others)
        self._hook.remove()
        if self._accepted:
            forget_scaler(self.optimizer)
        self._parts.clear()
        _alive.discard(self)

    def params(self) -> list[torch.Tensor]:
        """The parameters that backward steps."""
        held = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        return [param.sharded for unit in self._units for param in unit.params if id(param.sharded) in held]

    def __call__(self, params: Sequence[ManagedParameter]) -> None:
        """Step those of `params` that the optimizer holds, and free their gradients."""
        part = self._part(params)
        stepped = [param for members in part.members for param in members if param.grad is not None]
        if not stepped:
            return
        self.is_stepping = True
        try:
            if self._clip is not None:
                self._clip(stepped)
            self._step(part)
        finally:
            self.is_stepping = False
        for param in stepped:
            param.grad = None

    def _part(self, params: Sequence[ManagedParameter]) -> _Part:
        sharded = [param.sharded for param in params]
        lists = [(id(group["params"]), len(group["params"])) for group in self.optimizer.param_groups]
        part = self._parts.get(params[0])
        if part is None or not identical(sharded, part.sharded) or lists != part.lists:
            ids = set(map(id, sharded))
            members = [
                [param for param in group["params"] if id(param) in ids] for group in self.optimizer.param_groups
            ]
            part = self._parts[params[0]] = _Part([*sharded], lists, members)
        return part

    def _step(self, part: _Part) -> None:
        """`optimizer.step()`, while its param groups hold only this part."""
        optimizer = self.optimizer
        local = optimizer if isinstance(optimizer, LocalOptimizer) else None
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        flats = None if local is None else local.flats
        try:
            for group, members in zip(groups, part.members, strict=True):
                group["params"] = members
            if local is not None:
                local.flats = part.flats
            optimizer.step()
        finally:
            if local is not None:
                part.flats, local.flats = local.flats, flats
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        for group, before in zip(groups, options, strict=True):
            changed = [key for key, value in group.items() if key != "params" and before.get(key) is not value]
            if changed:
                raise ArgumentError(
                    f"step_in_backward: the step of {type(optimizer).__name__} changes the options {changed} of its "
                    "param groups, which now happens once per unit instead of once per step. Step it after backward."
                )


def _steppers_of(unit: Unit) -> list[StepInBackward]:
    return [call for call in unit.settings.when_reduced if isinstance(call, StepInBackward)]


def _refuse_scaler(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if take_from_scaler(optimizer):
        raise OrderError(
            f"GradScaler cannot step this {type(optimizer).__name__}: step_in_backward has stepped it already, with "
            "gradients that were still scaled and perhaps not finite, so the parameters are wrong. Start again in bf16 "
            "without a scaler, or without step_in_backward."
        )
