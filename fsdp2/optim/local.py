"""Optimizers of torch that step on local shards instead of through DTensors. Layer: optim.

Between steps a local optimizer is what the torch optimizer is: its parameters are the sharded parameters, its state
DTensors, and all that torch builds on that (schedulers, `GradScaler`, `state_dict`, hooks, distributed checkpoints)
works. Only within `step` its param groups and its state hold plain tensors on the same memory::

    step    the closure, if there is one
            param groups: each DTensor parameter -> its local tensor, with the local gradient
            state:        each DTensor           -> its local tensor
            the torch optimizer's own step
            state:        what is new -> a DTensor like its parameter; param groups: as before

The parameters and the state that one sees from outside are the truth: what is kept from step to step is compared with
them, by identity, before it is used. So whatever replaces a parameter's storage or the state is taken up.

This is right for optimizers that treat each element by itself, and only for those.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2.errors import ArgumentError

__all__ = ["LocalOptimizer", "local_optimizer"]

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

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
State = dict[Any, Any]


def local_optimizer(
    kind: type[torch.optim.Optimizer], params: Params, *, elementwise: bool = False, **options: Any
) -> "LocalOptimizer":
    """Make a `kind` that steps on the local shards of its DTensor parameters: the same values to the last bit, without
    DTensor's dispatch of every operation on every parameter, and without communication.

    The result is a `kind` as well as a `LocalOptimizer`. Outside of `step` nothing differs from ``kind(params,
    **options)``: the param groups hold the DTensors; the state consists of DTensors like their parameters (counters
    such as ``step`` are plain), so that state dicts and checkpoints go from one to the other in both directions.

    Args:
        kind: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD of `torch.optim`.
        params: what `kind` takes. Plain parameters among them are stepped as they are.
        elementwise: you vouch for another `kind`: it treats each element by itself, and keeps what it knows of a
            parameter in ``self.state[param]``. State of the shape of the local shard becomes a DTensor, other state
            stays as it is.
        **options: for `kind`. On CUDA, ``fused=True`` is the fastest. Note that, where none is given, torch chooses
            foreach on CUDA for plain tensors but not for DTensors.

    Raises:
        ArgumentError: `kind` is not known to be elementwise. An optimizer that looks at rows, matrices or all
            parameters at once (Muon, Adafactor, LBFGS, LAMB) would give wrong results on shards, without any error.
            Or ``differentiable=True``: local tensors have no graph.

    Example::

        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    """
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
        raise ArgumentError(
            f"local_optimizer: {kind.__module__}.{kind.__qualname__} is not known to treat each element by itself, "
            f"which stepping on shards needs; known are {known} of torch.optim. Use it on the DTensors (make it "
            "directly), or pass elementwise=True if you are sure."
        )
    if options.get("differentiable"):
        raise ArgumentError(
            f"local_optimizer: differentiable=True, but local tensors are outside of autograd; make {kind.__name__} "
            "directly"
        )
    base: Any = kind
    optimizer: LocalOptimizer = _local_class(base)(params, **options)
    return optimizer


class LocalOptimizer(torch.optim.Optimizer):
    """Base class of what `local_optimizer` makes, for `isinstance`."""

    def __init__(self, params: Params, **options: Any):
        self._entries: dict[DTensor, _Entry] = {}
        super().__init__(params, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy, and for `load_state_dict`."""
        self._entries = {}
        super().__setstate__(state)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the torch optimizer, on local tensors.

        Args:
            closure: computes the loss and the gradients anew, once; it finds the optimizer in its usual form.

        Raises:
            ArgumentError: a DTensor parameter has a gradient that is no DTensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = _without_hooks(super().step)
        self._entries = _entries_of(self.param_groups, self._entries)
        with _on_locals(self, self._entries):
            inner(self)
        # As after operations on the DTensors: autograd notices the change of what it may have saved.
        torch.autograd.graph.increment_version(list(self._entries))
        return loss


@cache
def _local_class(kind: Any) -> Any:
    return type(f"Local{kind.__name__}", (LocalOptimizer, kind), {"__doc__": kind.__doc__})


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function below torch's wrapper: that runs the step hooks, as the wrapper of our own `step` does already."""
    function: Any = getattr(step, "__func__", step)
    unwrapped: Callable[..., Any] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return unwrapped


class _Entry:
    """One DTensor parameter between outside and inside.

    Args:
        param: as it is outside.

    Attributes:
        base, pointer: the local tensor and its address.
        local: what the torch optimizer sees: a tensor of its own on that memory, which can have a gradient. A 0-dim one
            appears with one dim, so that its state differs from counters.
        state: what the torch optimizer sees; None before there is any.
        outside, inside: the values of the state out there and of `state`, when they were last the same.
    """

    __slots__ = ("base", "inside", "local", "outside", "pointer", "state")

    def __init__(self, param: torch.Tensor):
        self.base = local_tensor(param)
        self.pointer = self.base.data_ptr()
        local = self.base.detach()
        self.local = local if local.ndim else local.view(1)
        self.state: State | None = None
        self.outside: list[Any] = []
        self.inside: list[Any] = []

    def is_of(self, base: torch.Tensor) -> bool:
        """Whether that is still where the parameter has its values."""
        return base is self.base and base.data_ptr() == self.pointer

    def enter(self, param: DTensor, outer: State | None) -> State | None:
        """Take the gradient in; the state for the torch optimizer."""
        if param.grad is not None:
            grad = _local_grad(param, param.grad)
            if grad.dtype != self.local.dtype:
                self.local.grad_dtype = grad.dtype
            self.local.grad = grad if grad.ndim else grad.view(1)
        if outer is None:
            self.state = None
        elif self.state is None or not _identical(outer.values(), self.outside):
            self.state = {key: self._inner(value) for key, value in outer.items()}
            self.inside = []
        return self.state

    def leave(self, param: DTensor, outer: State, inner: State) -> None:
        """Bring the state outside up to date; let go of the gradient."""
        self.local.grad = None
        if inner is self.state and _identical(inner.values(), self.inside):
            return
        for key in outer.keys() - inner.keys():
            del outer[key]
        for key, value in inner.items():
            known = outer.get(key)
            if not isinstance(known, DTensor) or local_tensor(known) is not value:
                outer[key] = self._distributed(value, param)
        self.state = inner
        self.inside = list(inner.values())
        self.outside = [outer[key] for key in inner] if list(outer) == list(inner) else []

    def _inner(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensor = local_tensor(value)
        return tensor if tensor.ndim else tensor.view(1)

    def _distributed(self, value: Any, param: DTensor) -> Any:
        """State of the shape of the local tensor as a DTensor like the parameter; other state as it is."""
        if not isinstance(value, torch.Tensor) or value.shape != self.local.shape:
            return value
        spec = make_spec(param.device_mesh, param.placements, param.shape, param.stride(), value.dtype)
        return make_dtensor(value.view(self.base.shape), spec)


def _identical(these: Iterable[Any], those: Sequence[Any]) -> bool:
    """The same objects; `==` would compare the elements of tensors."""
    values = list(these)
    return len(values) == len(those) and all(map(is_, values, those))


def _local_grad(param: DTensor, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        raise ArgumentError(
            f"a DTensor parameter of shape {tuple(param.shape)} has a gradient that is a plain {type(grad).__name__}: "
            "set a DTensor with the parameter's placements"
        )
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def _entries_of(groups: list[dict[str, Any]], known: dict[DTensor, _Entry]) -> dict[DTensor, _Entry]:
    """One for each DTensor parameter: the known one, unless the parameter has other storage by now."""
    entries: dict[DTensor, _Entry] = {}
    for group in groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                entry = known.get(param)
                entries[param] = entry if entry is not None and entry.is_of(local_tensor(param)) else _Entry(param)
    return entries


@contextmanager
def _on_locals(optimizer: torch.optim.Optimizer, entries: dict[DTensor, _Entry]) -> Iterator[None]:
    """Put local tensors into the optimizer's groups and state, and DTensors back afterwards."""
    groups, state = optimizer.param_groups, optimizer.state
    before = [group["params"] for group in groups]
    inner: defaultdict[Any, State] = defaultdict(dict)
    try:
        for param, entry in entries.items():
            entered = entry.enter(param, state.get(param))
            if entered is not None:
                inner[entry.local] = entered
        for params in before:
            inner.update((param, state[param]) for param in params if param not in entries and param in state)
        for group, params in zip(groups, before, strict=True):
            group["params"] = [entries[param].local if param in entries else param for param in params]
        optimizer.state = inner
        yield
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params
        optimizer.state = state
        for param, entry in entries.items():
            if (now := inner.pop(entry.local, None)) is not None:
                entry.leave(param, state.setdefault(param, {}), now)
            else:
                entry.local.grad = None
        state.update(inner)
