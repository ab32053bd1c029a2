"""Optimizers for units with an `Offload` policy: their state is kept in host memory, and their step overlaps with
compute. Layer: optim.

::

    step()             returns at once; in the background, unit after unit in forward order:
                           step 1, step 2, step 3, ...
    forward of unit 1  waits for step 1, gathers and computes, while 2 and 3 are stepped
    forward of unit 2  waits for step 2, ...

The step is exact: it begins after all gradients are complete and clipped, and each unit computes with stepped
parameters. Nothing is speculative.

Source: ZeRO-Offload, https://arxiv.org/abs/2101.06840, whose delayed update this replaces.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from fsdp2._torch import backward_is_running
from fsdp2._torch.optim import accept_scaler, forget_scaler, take_from_scaler
from fsdp2.checks.step_hook import before_each_step
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.extras.host_memory import host
from fsdp2.extras.offload import Offload
from fsdp2.optim.flats import identical
from fsdp2.optim.local import ELEMENTWISE, LocalOptimizer, Params, check_elementwise, local_class
from fsdp2.optim.offloaded_part import Groups, OffloadedPart
from fsdp2.optim.staged import State
from fsdp2.optim.units import units_with
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.parameter import Plan

# With `step_in_backward`: the number of units whose gradients may wait for their step.
MAX_WAITING = 2


def offload_optimizer(
    kind: type[torch.optim.Optimizer], params: Params, *, elementwise: bool = False, **options: Any
) -> "OffloadedOptimizer":
    """Create a `kind` for parameters of units with an `Offload` policy: its state lives in host memory, and ``step()``
    returns before the parameters are stepped. Each unit is stepped in the background, in forward order, before its next
    all-gather.

    Results are bitwise those of `local_optimizer`, if the host computes as the device does. ``step()`` uses the
    gradients, options (the learning rate) and state at the time of the call. Reading a parameter, ``optimizer.state``,
    a state dict or a checkpoint waits for the steps that it needs, so no code has to change. The exception is a local
    tensor taken earlier with ``to_local()``: its memory changes during the step, so take it again.

    With `step_in_backward` units are stepped during backward, so the gradients of the whole model need not exist at
    once.

    Parameters of other units are stepped within ``step()``.

    Args:
        kind: as for `local_optimizer`, like the other arguments.
        params: parameters or param groups.
        elementwise: trust another `kind` to treat each element independently.
        **options: for `kind`.

    Raises:
        ArgumentError: none of the parameters is in a unit with an `Offload` policy; or as `local_optimizer`. In or
            after a step: it changed an option of a param group.
        Exception: (later) the error of a step is raised where the step is waited for.

    Example::

        fully_shard(model, offload_policy=Offload(grads=True))
        optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
        for batch in batches:
            model(batch).backward()
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    """
    check_elementwise("offload_optimizer", kind, elementwise, options)
    base: Any = kind
    optimizer: OffloadedOptimizer = _offloaded_class(base)(params, **options)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    if not _offloaded(held):
        raise ArgumentError(
            f"offload_optimizer: none of the {len(held)} parameters of this {kind.__name__} is in a unit with an "
            "Offload policy. Call fully_shard(..., offload_policy=Offload(...)) first, or use local_optimizer."
        )
    return optimizer


class OffloadedOptimizer(LocalOptimizer):
    """Base class of the optimizers from `offload_optimizer`, for `isinstance`."""

    _kind: Any = None

    def __init__(self, params: Params, **options: Any):
        self._known = _Known()
        self._made_with = options
        super().__init__(params, **options)
        forget_scaler(self)  # `GradScaler` checks for infinities itself, before it calls `step`
        held = [param for group in self.param_groups for param in group["params"]]
        if any(plan.grad_home != plan.roles.device for _, plan in _offloaded(held).values()):
            accept_scaler(self)  # so that `step` learns of it

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called after a copy, and by `load_state_dict`."""
        for part in self.__dict__.get("_known", _Known()).parts.values():
            part.settle()
        self._known = _Known()
        self.__dict__.setdefault("_made_with", {})
        super().__setstate__(state)

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state by parameter. Waits for all steps."""
        self.wait()
        state: defaultdict[Any, Any] = self.__dict__["state"]
        return state

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        """Replace it: by `load_state_dict`, and by the optimizer itself."""
        self.__dict__["state"] = state

    def wait(self) -> None:
        """Wait until all parameters are stepped and all state is stored. Only needed for measuring, because reading a
        parameter or state waits by itself.

        Raises:
            Exception: the error of a step; the first, if the steps of several units failed.
        """
        errors = []
        for wait in [each for part in self._known.parts.values() for each in (part.settle, part.synchronize)]:
            try:
                wait()
            except Exception as error:  # the others must be waited for too
                errors.append(error)
        self._known.recent.clear()
        if errors:
            raise errors[0]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Begin a step with the current gradients, options and state.

        Args:
            closure: computes the loss and the gradients again; called at once.

        Raises:
            UnsupportedError: called by a `GradScaler`, and gradients of an accelerator mesh are in host memory.
        """
        if take_from_scaler(self):
            # `torch.amp.GradScaler._unscale_grads_` copies the scale to the gradients' device with non_blocking=True.
            raise UnsupportedError(
                f"GradScaler cannot step this {type(self).__name__}: gradients are in host memory, and torch's scaler "
                "reads its scale there before the copy of it is complete, so they are already wrong. Use bf16, which "
                "needs no scaler, or Offload(), which leaves gradients on the device."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(param.grad is None for group in self.param_groups for param in group["params"]):
            return loss  # backward has begun their steps (`step_in_backward`)
        parts, rest = self._divided()
        states: State = self.__dict__["state"]
        offloaded = {id(param) for part in parts for param in part.params}
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None and id(param) in offloaded:
                states.setdefault(param, {})  # in parameter order, on which code that gathers states relies
        if any(rest):
            with _holding(self.param_groups, rest):
                super().step()
        for part in sorted(parts, key=lambda part: part.seen):
            part.begin(self.param_groups, states)
            if backward_is_running():
                self._known.recent.append(part)
                while len(self._known.recent) > MAX_WAITING:
                    self._known.recent.popleft().release()
        return loss

    def with_state_in_host_memory(self) -> set[torch.Tensor]:
        """The parameters whose state is kept in host memory or in files: for checkpoints that fill an optimizer before
        its first step, because the device may have no room for all of it."""
        held = [param for group in self.param_groups for param in group["params"]]
        offloaded = _offloaded(held)
        return {param for param in held if id(param) in offloaded}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any optimizer. With ``set_to_none=False`` it waits for the steps, which still read the gradients."""
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    def _divided(self) -> "tuple[list[OffloadedPart], list[list[torch.Tensor]]]":
        """The parts that are stepped in the background, settled, and for each param group the other parameters."""
        lists = [group["params"] for group in self.param_groups]
        held = [param for each in lists for param in each]
        key = tuple(map(id, lists))
        known = self._known.divisions.get(key)
        if known is None or not identical(held, known.held) or [*map(len, lists)] != known.sizes:
            if known is not None:
                self._known.divisions.clear()
            known = self._known.divisions[key] = _divide(lists)
        parts = [self._part(key, *each) for key, each in known.shares.items()]
        return parts, known.rest

    def _part(self, key: Any, group: Bucket, plan: Plan, lists: list[list[Any]]) -> OffloadedPart:
        part = self._known.parts.get(key)
        if part is not None:
            part.settle()
        if part is None or not part.is_current(lists):
            part = self._known.parts[key] = OffloadedPart(group, plan, lists, self._made, self.param_groups)
        return part

    def _made(self, groups: Groups, joins: bool) -> LocalOptimizer:
        optimizer: LocalOptimizer = local_class(self._kind, joins)(groups, **self._made_with)
        return optimizer


@cache
def _offloaded_class(kind: Any) -> Any:
    own = {"__doc__": kind.__doc__, "_joins": kind in ELEMENTWISE, "_kind": kind}
    return type(f"Offloaded{kind.__name__}", (OffloadedOptimizer, kind), own)


@dataclass
class _Known:
    """What an optimizer remembers from step to step.

    Attributes:
        parts: the parts that it steps in the background, by group and dtype.
        divisions: how its parameters are divided, by its lists of parameters.
        recent: parts whose gradients may still be in use.
    """

    parts: dict[Any, OffloadedPart] = field(default_factory=dict)
    divisions: "dict[tuple[int, ...], _Division]" = field(default_factory=dict)
    recent: deque[OffloadedPart] = field(default_factory=deque)


class _Division(NamedTuple):
    """The parameters of an optimizer, by where they are stepped.

    Attributes:
        held, sizes: all parameters, and their number in each param group.
        shares: for each part its group, the plan of its parameters, and these as one list per param group.
        rest: the parameters that are not offloaded, also as one list per param group.
    """

    held: list[torch.Tensor]
    sizes: list[int]
    shares: dict[Any, tuple[Bucket, Plan, list[list[Any]]]]
    rest: list[list[torch.Tensor]]


def _divide(lists: Sequence[Sequence[torch.Tensor]]) -> _Division:
    held = [param for each in lists for param in each]
    offloaded = _offloaded(held)
    shares: dict[Any, tuple[Bucket, Plan, list[list[Any]]]] = {}
    rest: list[list[torch.Tensor]] = [[] for _ in lists]
    for index, each in enumerate(lists):
        for param in each:
            if id(param) not in offloaded:
                rest[index].append(param)
                continue
            group, plan = offloaded[id(param)]
            key = id(group), param.dtype  # each dtype of gradients is reduced separately
            shares.setdefault(key, (group, plan, [[] for _ in lists]))[2][index].append(param)
    return _Division(held, [*map(len, lists)], shares, rest)


def _offloaded(params: Sequence[torch.Tensor]) -> dict[int, tuple[Bucket, Plan]]:
    """The groups and plans of parameters in units with an `Offload` policy, by their ids."""
    return {
        id(param.sharded): (group, param.plan)
        for unit in units_with(params)
        for group in unit.groups
        for param in group.params
        if isinstance(param.plan.offload, Offload) and param.at_rest is not None
    }


@contextmanager
def _holding(groups: Groups, lists: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """In the block, the param groups hold these parameters."""
    before = [group["params"] for group in groups]
    try:
        for group, each in zip(groups, lists, strict=True):
            group["params"] = each
        yield
    finally:
        for group, each in zip(groups, before, strict=True):
            group["params"] = each


_checked: "WeakSet[torch.optim.Optimizer]" = WeakSet()


@before_each_step
def _check_follows_policy(optimizer: torch.optim.Optimizer) -> None:
    """Called before the first step of each optimizer.

    Raises:
        ArgumentError: it would keep state on the device that belongs in host memory.
    """
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        return
    held = [param for group in optimizer.param_groups for param in group["params"]]
    plans = [plan for _, plan in _offloaded(held).values()]
    if any(plan.home != host() for plan in plans):
        kind = type(optimizer).__name__
        name = kind.removeprefix("Local")
        if any(each.__name__ == name for each in ELEMENTWISE):
            way = f"Create it with fsdp2.offload_optimizer(torch.optim.{name}, ...)."
        else:
            way = "Use an elementwise optimizer of torch.optim, or CPUOffloadPolicy instead of Offload."
        raise ArgumentError(
            f"this {kind} would keep its state on {plans[0].roles.device}, and its parameters are in units with "
            f"{plans[0].offload}. {way}"
        )
