"""`SteppedRun`: parameters that a local optimizer steps as one tensor. Layer: optim, below local.

Shards of a group are contiguous in memory, and so are their gradients (`fsdp2.adjacent`). An elementwise optimizer may
step the whole run instead: the same arithmetic in one call. A parameter without such neighbours is a run of its own.

Inside, a run has one state. Outside, each parameter has its own state on the same memory: DTensors on parts of it, and
counters that are elements of a vector with one element per parameter. The outside is authoritative. What is kept from
step to step is compared with it, by identity and version, before it is used.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import base_of, grad_of, local_of, local_tensor, make_dtensor, make_spec, spec_of, version
from fsdp2.adjacent import can_carve, carve, over, runs_of, span_of
from fsdp2.errors import ArgumentError
from fsdp2.optim.loading import own_part
from fsdp2.optim.norms import by_device_and_dtype

__all__ = [
    "SteppedRun",
    "identical",
    "is_current",
    "joined_grad",
    "local_grad",
    "runs_to_step",
    "values_of",
]

State = dict[Any, Any]

Counter = tuple[torch.Tensor, torch.Tensor, int]  # the first parameter's, those of the others, and their version

_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class SteppedRun:
    """One parameter, or several that are contiguous, with contiguous gradients and states of the same kind.

    Args:
        params: in memory order.
        local: over their shards.

    Attributes:
        local: the tensor that the torch optimizer sees: a separate tensor on that memory, which can have a gradient. A
            0-dim one gets one dim, so that its state differs from counters.
        state: the state that the torch optimizer sees; None before there is any.
        has_grad: whether there is something to step.
        bases: the parameters' local tensors.
        grad_specs, grad_offsets: of the parameters' gradients, if all are DTensors: the spec of each, and its distance
            from the first in bytes.
        outers: the parameters' states.
        values: all values in these states.
        counters: of the parameters.
    """

    __slots__ = (
        "_inside",
        "_pointers",
        "bases",
        "counters",
        "grad_offsets",
        "grad_specs",
        "has_grad",
        "local",
        "outers",
        "params",
        "state",
        "values",
    )

    def __init__(self, params: Sequence[DTensor], local: torch.Tensor):
        self.params = params
        local = local.detach()
        self.local = local if local.ndim else local.view(1)
        self.state: State | None = None
        self.has_grad = False
        self.bases = [local_tensor(param) for param in params]
        self._pointers = [base.data_ptr() for base in self.bases]
        self.grad_specs: list[Any] = []
        self.grad_offsets: list[int] = []
        self.outers: list[State | None] = []
        self.values: list[Any] = []
        self._inside: list[Any] = []  # the values in `state`
        self.counters: list[Counter] = []

    # --- in ----------------------------------------------------------------------------------------------------------

    def begin(self, states: Mapping[Any, State]) -> None:
        """Read gradients and state for the first time."""
        grads = [param.grad for param in self.params if param.grad is not None]
        assert len(grads) == len(self.params) or len(self.params) == 1
        if grads and all(map(_is_placed_alike, grads, self.params)):
            addresses = list(map(_address_of, map(local_of, grads)))
            self.grad_specs = list(map(spec_of, grads))
            self.grad_offsets = [address - addresses[0] for address in addresses]
        taken = self._take_grads()
        assert taken
        self.outers = list(map(states.get, self.params))
        outers = [outer for outer in self.outers if outer is not None]
        if outers:
            self.state = {key: self._joined([outer[key] for outer in outers]) for key in outers[0]}
            self._show(outers)

    def enter(self, states: Mapping[Any, State]) -> bool:
        """Read this step's gradients, if nothing else has changed since the last step. Otherwise returns False, and a
        new run must begin in its place."""
        return (
            all(map(is_, map(local_of, self.params), self.bases))
            and list(map(_address_of, self.bases)) == self._pointers
            and identical(map(states.get, self.params), self.outers)
            and (self.state is None or identical(values_of(self.outers), self.values))
            and all(map(is_current, self.counters))
            and self._take_grads()
        )

    def _take_grads(self) -> bool:
        if len(self.params) == 1:
            grad = self.params[0].grad
            self.has_grad = False
            if grad is not None:
                if isinstance(grad, DTensor) and grad.placements == self.params[0].placements:
                    self.grad_specs, self.grad_offsets = [spec_of(grad)], [0]
                self.set_grad(local_grad(self.params[0], grad))
            return True
        grads = list(map(grad_of, self.params))
        if not all(map(isinstance, grads, repeat(DTensor))) or not identical(map(spec_of, grads), self.grad_specs):
            return False
        locals_ = list(map(local_of, grads))
        addresses = list(map(_address_of, locals_))
        if [address - addresses[0] for address in addresses] != self.grad_offsets:
            return False
        joined = joined_grad(self.local, base_of(locals_[0]), addresses[0])
        if joined is not None:
            self.set_grad(joined)
        return joined is not None

    def set_grad(self, grad: torch.Tensor) -> None:
        """Give the torch optimizer this gradient to step with."""
        if grad.dtype != self.local.dtype:
            self.local.grad_dtype = grad.dtype
        self.local.grad = grad if grad.ndim else grad.view(1)
        self.has_grad = True

    def _joined(self, values: Sequence[Any]) -> Any:
        """One value for the run, from the equal values of its parameters."""
        first = values[0]
        if isinstance(first, DTensor):
            locals_ = [local_tensor(value) for value in values]
            if len(locals_) == 1:
                return locals_[0] if locals_[0].ndim else locals_[0].view(1)
            run = runs_of(locals_)[0]
            if run.indices == list(range(len(values))) and all(map(_have_same_strides, locals_, self.bases)):
                return run.tensor
            whole = torch.empty_like(self.local, dtype=first.dtype)
            for piece, local in zip(self._pieces(whole), locals_, strict=True):
                piece.copy_(local)
            return whole
        if isinstance(first, torch.Tensor) and len(values) > 1:
            return first.clone()
        if isinstance(first, torch.Tensor) and first.shape == self.params[0].shape != self.bases[0].shape:
            return own_part(first, self.params[0])
        return first

    # --- out ---------------------------------------------------------------------------------------------------------

    def leave(self, states: State, inner: State) -> None:
        """Update the state outside, and release the gradient."""
        self.local.grad = None
        if inner is self.state and identical(inner.values(), self._inside):
            for index, (first, rest, _) in enumerate(self.counters):
                rest.copy_(first)
                self.counters[index] = first, rest, version(rest)
            return
        self.state = inner
        self._show([states.setdefault(param, {}) for param in self.params])

    def _show(self, outers: Sequence[State]) -> None:
        """Make the states outside match `state`."""
        state = self.state
        assert state is not None
        self.counters = []
        for outer in outers:
            for key in outer.keys() - state.keys():
                del outer[key]
        for key, value in list(state.items()):
            known = [outer.get(key) for outer in outers]
            for outer, shown in zip(outers, self._shown(key, value, known), strict=True):
                outer[key] = shown
        self._inside = list(state.values())
        self.outers = [*outers]
        self.values = list(values_of(outers))

    def _shown(self, key: Any, value: Any, known: Sequence[Any]) -> Sequence[Any]:
        """The values for the parameters' states. `known`: their current values, which are kept if they are right."""
        assert self.state is not None
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.params)
        if value.shape == self.local.shape:
            pieces = self._pieces(value)
            return [
                old if isinstance(old, DTensor) and _are_same(local_tensor(old), piece) else _distributed(piece, param)
                for old, piece, param in zip(known, pieces, self.params, strict=True)
            ]
        if len(self.params) == 1:
            is_known = isinstance(known[0], DTensor) and local_tensor(known[0]) is value
            return known if is_known else [value]
        vector = value.new_empty(len(self.params))
        vector.copy_(value)
        first = self.state[key] = vector[0]
        self.counters.append((first, vector[1:], version(vector)))
        return [first, *vector[1:].unbind()]

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor like `local`, with the parameter's shape."""
        if len(self.bases) == 1:
            return [whole.view(self.bases[0].shape)]
        pieces = carve(whole, [base.numel() for base in self.bases])
        return [piece.as_strided(base.shape, base.stride()) for piece, base in zip(pieces, self.bases, strict=True)]


def joined_grad(local: torch.Tensor, whole: torch.Tensor | None, address: int) -> torch.Tensor | None:
    """The gradient of a run: the elements of `whole` from an address on, as many as the run has; None if they are not
    there."""
    if whole is None:
        return None
    if whole.ndim == 1 and whole.numel() == local.numel() and whole.data_ptr() == address:
        return whole  # the gradients of a unit are all of what its reduction produced
    return over(whole, address, local.numel() * whole.itemsize)


def is_current(counter: Counter) -> bool:
    """Whether the parameters' counters are still equal. On the CPU this also detects changes that autograd does not
    see."""
    first, rest, known = counter
    if version(rest) != known:
        return False
    return not rest.is_cpu or rest.tolist().count(first.item()) == len(rest)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and _have_same_strides(one, other)


def values_of(states: Iterable[State | None]) -> Iterable[Any]:
    """All values in these states."""
    return chain.from_iterable(state.values() for state in states if state is not None)


def _have_same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride()


def _distributed(local: torch.Tensor, param: DTensor) -> DTensor:
    spec = make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype)
    return make_dtensor(local, spec)


def identical(these: Iterable[Any], those: Sequence[Any]) -> bool:
    """Whether these are the same objects; `==` would compare the elements of tensors."""
    values = list(these)
    return len(values) == len(those) and all(map(is_, values, those))


def _is_placed_alike(grad: torch.Tensor, param: DTensor) -> bool:
    return isinstance(grad, DTensor) and grad.placements == param.placements


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        raise ArgumentError(
            f"a DTensor parameter of shape {tuple(param.shape)} has a gradient that is a plain {type(grad).__name__}: "
            "set a DTensor with the parameter's placements"
        )
    assert isinstance(param, DTensor)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


# --- which parameters make a run --------------------------------------------------------------------------------------


def runs_to_step(params: Sequence[DTensor], states: Mapping[Any, State], joins: bool) -> list[SteppedRun]:
    """The parameters of one param group as runs that have begun; each is in exactly one run.

    Args:
        joins: whether a run may have several parameters.
    """
    found = _Candidates(params, states) if joins else None
    chunks = list(found.chunks()) if found is not None else []
    joined = {param for chunk in chunks for param in chunk}
    runs = [SteppedRun(chunk, runs_of([local_tensor(param) for param in chunk])[0].tensor) for chunk in chunks]
    runs += [SteppedRun([param], local_tensor(param)) for param in params if param not in joined]
    for run in runs:
        run.begin(states)
    return runs


class _Candidates:
    """Parameters that may be merged with neighbours: their gradients are parts of larger tensors, and their states can
    be compared."""

    def __init__(self, params: Sequence[DTensor], states: Mapping[Any, State]):
        self._params = [param for param in params if _may_have_neighbours(param) and _has_neighbourly_grad(param)]
        counters = [
            value for param in self._params for value in (states.get(param) or {}).values() if _is_counter(value)
        ]
        self._numbers = {
            id(value): number
            for values in by_device_and_dtype(counters).values()
            for value, number in zip(values, torch.stack(values).tolist(), strict=True)  # one device synchronisation
        }
        self._kinds = [self._kind_of(param, states.get(param)) for param in self._params]

    def _kind_of(self, param: DTensor, state: State | None) -> Hashable:
        """A key that is equal for states that one state can represent."""
        if state is None:
            return None
        return tuple((key, self._kind_of_value(param, value)) for key, value in state.items())

    def _kind_of_value(self, param: DTensor, value: Any) -> Hashable:
        if _is_counter(value):
            return value.dtype, value.device, self._numbers[id(value)]
        if isinstance(value, DTensor):
            base, local = local_tensor(param), local_tensor(value)
            is_like = local.shape == base.shape and local.device == base.device and value.placements == param.placements
            return local.dtype if is_like else object()
        return value if value is None or isinstance(value, (bool, int, float, str)) else object()

    def chunks(self) -> Iterator[list[DTensor]]:
        """The groups that can be merged, of at least two parameters each."""
        for run in runs_of([local_tensor(param) for param in self._params]):
            first = 0
            for after in range(1, len(run.indices) + 1):
                if after < len(run.indices) and self._go_together(run.indices[after - 1], run.indices[after]):
                    continue
                if after - first > 1:
                    yield [self._params[index] for index in run.indices[first:after]]
                first = after

    def _go_together(self, one: int, other: int) -> bool:
        before, after = (local_of(self._params[index].grad) for index in (one, other))
        whole = base_of(before)
        return (
            self._kinds[one] == self._kinds[other]
            and whole is not None
            and before.data_ptr() + before.nbytes == after.data_ptr()
            and over(whole, before.data_ptr(), before.nbytes + after.nbytes) is not None
        )


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim == 0


def _may_have_neighbours(param: DTensor) -> bool:
    local = local_tensor(param)
    return can_carve(local) and span_of(local) is not None


def _has_neighbourly_grad(param: DTensor) -> bool:
    """Whether the gradient is a part of a larger tensor, with the same layout as the parameter."""
    grad = param.grad
    if not isinstance(grad, DTensor) or grad.placements != param.placements:
        return False
    local, base = local_tensor(grad), local_tensor(param)
    whole = base_of(local)
    return (
        whole is not None
        and whole.dtype == local.dtype
        and local.shape == base.shape
        and local.stride() == base.stride()
        and local.device == base.device
        and local.numel() > 0
        and not (local.is_conj() or local.is_neg())
    )
