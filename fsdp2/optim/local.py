"""torch optimizers that step on local shards instead of through DTensors. Layer: optim.

Between steps a local optimizer behaves like the torch optimizer: it holds the sharded parameters and DTensor state, and
everything in torch that builds on these (schedulers, `GradScaler`, `state_dict`, hooks, distributed checkpoints) works.
Only within `step` do its param groups and its state hold plain tensors on the same memory::

    step    the closure, if there is one
            param groups: DTensor parameters -> their local tensors, with the local gradients; contiguous ones are
                          merged into one tensor
            state:        DTensors           -> their local tensors, merged likewise
            the torch optimizer's own step
            state:        new entries -> DTensors like their parameters; param groups: as before

The parameters and the state that are visible from outside are authoritative (see `SteppedRun`), so replacing a
parameter's storage or its state takes effect.

This is correct only for elementwise optimizers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2.checks.unreduced import check_reduced
from fsdp2.errors import ArgumentError
from fsdp2.optim.run import SteppedRun, identical, runs_to_step
from fsdp2.optim.steady import Steady, is_referred_to

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

# The number of steady steps (no run changes) before merging is tried again for parameters that are stepped
# individually. It grows fourfold after each try. Runs that fail are rebuilt at once, unless they have failed
# repeatedly: if half of the experts have no gradient, different ones each time, all runs would be rebuilt in each step.
PATIENCE = 4
AT_ONCE, LONGEST = PATIENCE**3, PATIENCE**6

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


def local_optimizer(
    kind: type[torch.optim.Optimizer], params: Params, *, elementwise: bool = False, **options: Any
) -> "LocalOptimizer":
    """Create a `kind` that steps on the local shards of its DTensor parameters: bitwise the same values, without
    DTensor's dispatch of every operation on every parameter, and without communication. Shards that are contiguous in
    memory, like those of a unit, are stepped as one tensor. (With ``fused=True`` on the CPU that may change the last
    bit: torch rounds the elements at the end of a tensor that do not fill a vector register differently from the rest.)

    The result is an instance of both `kind` and `LocalOptimizer`. Outside of `step` it does not differ from
    ``kind(params, **options)``: the param groups hold the DTensors, and the state consists of DTensors like their
    parameters (counters such as ``step`` are plain), so state dicts and checkpoints are interchangeable.

    Args:
        kind: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD of `torch.optim`.
        params: as for `kind`. Plain parameters are allowed and stepped directly.
        elementwise: set True for another `kind` that treats each element independently and keeps its per-parameter
            state in ``self.state[param]``. State of the shape of the local shard becomes a DTensor; other state is
            unchanged.
        **options: for `kind`. On CUDA, ``fused=True`` is fastest. If none is given, torch chooses foreach on CUDA for
            plain tensors but not for DTensors.

    Raises:
        ArgumentError: `kind` is not known to be elementwise (an optimizer that works on rows, matrices or all
            parameters at once, such as Muon, Adafactor, LBFGS or LAMB, would silently give wrong results on shards); or
            ``differentiable=True``, because local tensors have no graph.

    Example::

        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    """
    check_elementwise("local_optimizer", kind, elementwise, options)
    base: Any = kind
    optimizer: LocalOptimizer = local_class(base)(params, **options)
    return optimizer


def check_elementwise(call: str, kind: type, elementwise: bool, options: Mapping[str, Any]) -> None:
    """For `call`, which was asked for an optimizer of this `kind`.

    Raises:
        ArgumentError: it may not be stepped on local shards.
    """
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
        raise ArgumentError(
            f"{call}: {kind.__module__}.{kind.__qualname__} is not known to treat each element by itself, "
            f"which stepping on shards needs; known are {known} of torch.optim. If it steps each matrix as a whole, "
            "use fsdp2.matrix_optimizer; otherwise make it directly, on the DTensors, or pass elementwise=True if you "
            "are sure."
        )
    if options.get("differentiable"):
        raise ArgumentError(
            f"{call}: differentiable=True, but local tensors are outside of autograd; make {kind.__name__} directly"
        )


class LocalOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers from `local_optimizer`, for `isinstance`.

    Attributes:
        taken: what each param group's last step found; empty before the first. Only `step` uses it, and works without.
    """

    counts_changes = True  # of parameters itself, see `fsdp2.checks.step_hook`
    _joins = False  # whether contiguous parameters may be merged: only for optimizers known to be elementwise

    def __init__(self, params: Params, **options: Any):
        self.taken: list[_Taken] = []
        self._times_shown = 0
        super().__init__(params, **options)

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of each parameter. Whoever has seen it may have changed it, so the next step compares it."""
        self._times_shown += 1
        found: defaultdict[Any, Any] = self.__dict__["state"]
        return found

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        """Another one: the next step compares it."""
        self._times_shown += 1
        self.__dict__["state"] = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called after a copy, and by `load_state_dict`."""
        self.taken = []
        self._times_shown = self.__dict__.get("_times_shown", 0) + 1
        super().__setstate__(state)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the torch optimizer, on local tensors.

        Args:
            closure: computes the loss and the gradients again. It is called once, with the optimizer in its usual form.

        Raises:
            ArgumentError: a DTensor parameter has a gradient that is not a DTensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(param.grad is None for group in self.param_groups for param in group["params"]):
            return loss  # backward may have stepped them (`step_in_backward`)
        inner = without_hooks(super().step)
        try:
            self.taken = [
                self._take(group["params"], self.taken[index] if index < len(self.taken) else None).prepared()
                for index, group in enumerate(self.param_groups)
            ]
        except BaseException:
            self.taken = []  # releases the gradients too
            raise
        times_shown = self._times_shown
        with _on_locals(self, self.taken):
            inner(self)
        # As after operations on the DTensors: tells autograd that tensors it may have saved have changed.
        torch.autograd.graph.increment_version([tensor for each in self.taken for tensor in each.written()])
        self._times_shown = times_shown  # the step itself has looked inside
        self.taken = [
            each
            if each.compared_at == times_shown or is_referred_to(self.__dict__, each.runs)
            else each._replace(compared_at=times_shown)
            for each in self.taken
        ]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the sharded gradients. Warns if others wait to be reduced, which it does not clear."""
        super().zero_grad(set_to_none)
        params = (param for group in self.param_groups for param in group["params"])
        check_reduced("zero_grad", params, is_read=False)

    def _take(self, held: list[torch.Tensor], before: "_Taken | None") -> "_Taken":
        """The parameters of one group with this step's gradients. Runs are kept if nothing else has changed."""
        state = self.__dict__["state"]
        if before is None or not identical(held, before.snapshot):
            return self._begin(held)
        kept: list[SteppedRun] = []
        failed: list[SteppedRun] = []
        if before.quick is not None and before.quick.enter(None if before.compared_at == self._times_shown else state):
            kept = before.runs
        else:
            for run in before.runs:
                (kept if run.enter(state) else failed).append(run)
            before = before._replace(quick=None)
        longer = min(PATIENCE * before.wait, LONGEST)
        if failed:
            params = [param for run in failed for param in run.params]
            wait = PATIENCE if before.steady >= PATIENCE else longer if before.wait <= AT_ONCE else before.wait
            runs = runs_to_step(params, state, self._joins and wait <= AT_ONCE)
            return before._replace(held=held, runs=[*kept, *runs], steady=0, wait=wait)
        steady = before.steady + 1
        if self._joins and steady >= before.wait and any(len(run.params) == 1 for run in kept) and not _is_capturing():
            return self._begin(held)._replace(wait=longer)
        return before._replace(held=held, steady=steady)

    def _begin(self, held: list[torch.Tensor]) -> "_Taken":
        sharded = [param for param in held if isinstance(param, DTensor)]
        plain = [param for param in held if not isinstance(param, DTensor)]
        runs = runs_to_step(sharded, self.__dict__["state"], self._joins)
        return _Taken(held, list(held), runs, plain, 0, PATIENCE, None, -1)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured; then values must not be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def local_class(kind: Any, joins: bool = True) -> Any:
    """The class of local optimizers of this kind. `joins`: whether contiguous parameters may be merged, if the kind is
    known to be elementwise."""
    own = {"__doc__": kind.__doc__, "_joins": joins and kind in ELEMENTWISE}
    return type(f"Local{kind.__name__}", (LocalOptimizer, kind), own)


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside torch's wrapper. That runs the step hooks, as the wrapper of our own `step` already does."""
    function: Any = getattr(step, "__func__", step)
    unwrapped: Callable[..., Any] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return unwrapped


class _Taken(NamedTuple):
    """The parameters of one param group in a step.

    Attributes:
        held: the list of the param group.
        snapshot: its content when `runs` were created.
        runs: the DTensor parameters, as runs.
        plain: the other parameters.
        steady: steps since runs were last created.
        wait: the number of these after which merging is tried again.
        quick: checks all of them at once in the next step, if it can.
        compared_at: how often the optimizer's state had been shown to somebody when it was known to be as it should,
            with nobody else holding it.
    """

    held: list[torch.Tensor]
    snapshot: list[torch.Tensor]
    runs: list[SteppedRun]
    plain: list[torch.Tensor]
    steady: int
    wait: int
    quick: Steady | None
    compared_at: int

    def prepared(self) -> "_Taken":
        """With `quick`, if possible."""
        return self if self.quick is not None else self._replace(quick=Steady.of(self.runs))

    def written(self) -> list[torch.Tensor]:
        """The DTensors that the step changes, and their local tensors."""
        if self.quick is not None:
            return self.quick.written
        params = [param for run in self.runs if run.has_grad for param in run.params]
        return [*params, *map(local_tensor, params)]


@contextmanager
def _on_locals(optimizer: torch.optim.Optimizer, taken: Sequence[_Taken]) -> Iterator[None]:
    """Put local tensors into the optimizer's groups and state, and DTensors back afterwards."""
    groups, state = optimizer.param_groups, optimizer.__dict__["state"]
    runs = [run for each in taken for run in each.runs]
    inner: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)
    try:
        for run in runs:
            if run.state is not None:
                inner[run.local] = run.state
        for group, each in zip(groups, taken, strict=True):
            inner.update((param, state[param]) for param in each.plain if param in state)
            group["params"] = [*(run.local for run in each.runs), *each.plain]
        optimizer.__dict__["state"] = inner
        yield
    finally:
        for group, each in zip(groups, taken, strict=True):
            group["params"] = each.held
        optimizer.__dict__["state"] = state
        _give_places(state, inner, taken)
        for run in runs:
            if (now := inner.pop(run.local, None)) is not None:
                run.leave(state, now)
            else:
                run.local.grad = None
        state.update(inner)


def _give_places(state: dict[Any, Any], inner: dict[Any, Any], taken: Sequence[_Taken]) -> None:
    """Add new entries to `state` in the order of the parameters, whatever their runs. This order is the same on all
    ranks, and code that gathers the state depends on it."""
    for each in taken:
        new: set[torch.Tensor] = {param for param in each.plain if param in inner and param not in state}
        for run in each.runs:
            new.update(run.params if run.state is None and run.local in inner else [])
        for param in each.held if new else ():
            if param in new:
                state.setdefault(param, {})
