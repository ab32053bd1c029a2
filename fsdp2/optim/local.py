"""torch optimizers that step on local shards instead of through DTensors. Layer: optim.

Between steps a local optimizer behaves like the torch optimizer: it holds the sharded parameters and DTensor state, and
everything in torch that builds on these (schedulers, `GradScaler`, `state_dict`, hooks, distributed checkpoints) works.
Within `step`, after the closure, its param groups and its state hold plain tensors on the same memory (see `flats`).
This is correct only for elementwise optimizers.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from fsdp2.checks.unreduced import check_reduced
from fsdp2.errors import ArgumentError
from fsdp2.optim.flats import Flats

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(getattr(torch.optim, name) for name in _NAMES.split())

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


def local_optimizer(
    kind: type[torch.optim.Optimizer], params: Params, *, elementwise: bool = False, **options: Any
) -> "LocalOptimizer":
    """Create a `kind` that steps the local shards of its DTensor parameters: bitwise the same values, without DTensor's
    dispatch of every operation on every parameter, and without communication. Shards that lie end to end in memory,
    like those of a unit, are stepped as one tensor. (With ``fused=True`` on the CPU that may change the last bit: torch
    rounds the last elements of a tensor, which do not fill a vector register, differently from the rest.)

    The result is an instance of both `kind` and `LocalOptimizer`. Outside of `step` it behaves like
    ``kind(params, **options)``: the param groups hold the DTensors, and the state consists of DTensors like their
    parameters (counters such as ``step`` are plain), so state dicts and checkpoints are interchangeable.

    Args:
        kind: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD of `torch.optim`.
        params: as for `kind`. Plain parameters are allowed and stepped directly.
        elementwise: set True for another `kind` that treats each element independently and keeps its state in
            ``self.state[param]``. State tensors of the local shard's shape become DTensors.
        **options: for `kind`. On CUDA, ``fused=True`` is fastest. By default torch chooses foreach on CUDA for plain
            tensors but not for DTensors.

    Raises:
        ArgumentError: `kind` is not known to be elementwise (an optimizer that works on rows, matrices or all
            parameters at once, such as Muon, Adafactor, LBFGS or LAMB, would give wrong results on shards); or
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
    """Raise if an optimizer of this `kind`, passed to `call`, may not be stepped on local shards."""
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
        raise ArgumentError(
            f"{call}: {kind.__module__}.{kind.__qualname__} is not known to be elementwise, as {known} of "
            "torch.optim are. If it steps whole matrices, use fsdp2.matrix_optimizer; otherwise create it directly, on "
            "DTensors, or pass elementwise=True if you are sure."
        )
    if options.get("differentiable"):
        raise ArgumentError(
            f"{call}: differentiable=True, but local tensors have no graph; create {kind.__name__} directly"
        )


class LocalOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers from `local_optimizer`, for `isinstance`.

    Attributes:
        flats: the tensors that the last step stepped; None if the next step cannot reuse them.
    """

    counts_changes = True  # it bumps version counters itself, see `fsdp2.checks.step_hook`
    _joins = False  # whether parameters may be stepped as one tensor: only for optimizers known to be elementwise

    def __init__(self, params: Params, **options: Any):
        self.flats: Flats | None = None
        super().__init__(params, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called after a copy, and by `load_state_dict`."""
        self.flats = None
        super().__setstate__(state)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the torch optimizer, on local tensors.

        Args:
            closure: computes the loss and the gradients again. Called once, while the optimizer holds its DTensors.

        Raises:
            ArgumentError: a DTensor parameter has a gradient that is not a DTensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, states = self.param_groups, self.__dict__["state"]
        held = [group["params"] for group in groups]
        if all(param.grad is None for params in held for param in params):
            return loss  # backward may have stepped the parameters (`step_in_backward`)
        flats = self.flats
        if flats is None or not flats.fits(held, states):
            flats = self.flats = Flats(held, states, self._joins)
        for group, stepped in zip(groups, flats.groups, strict=True):
            group["params"] = stepped
        try:
            without_hooks(super().step)(self)
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            flats.leave()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the sharded gradients. Warns about unreduced gradients, which it does not clear."""
        super().zero_grad(set_to_none)
        check_reduced("zero_grad", (p for group in self.param_groups for p in group["params"]), is_read=False)


@cache
def local_class(kind: Any, joins: bool = True) -> Any:
    """The class of local optimizers of this kind. `joins`: whether parameters may be stepped as one tensor, if the kind
    is known to be elementwise."""
    own = {"__doc__": kind.__doc__, "_joins": joins and kind in ELEMENTWISE}
    return type(f"Local{kind.__name__}", (LocalOptimizer, kind), own)


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside torch's wrapper, which would run the step hooks a second time."""
    function: Any = getattr(step, "__func__", step)
    unwrapped: Callable[..., Any] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return unwrapped
