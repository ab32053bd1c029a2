"""Joins tensors that lie end to end in memory into one: an elementwise operation on it equals the operation on each of
them, in one call. Layer: optim, below local.

    shards     [ a a a ] [ b b ] [ c ]    each with its own storage, carved from one block (`carving.py`)
    gradients  [ a a a     b b     c ]    views of the output of one reduction
    a `Flat`   [ a a a     b b     c ]    what torch's optimizer sees: one parameter, one gradient, one state

Each parameter shows its own state: parts of the flat one, and counters. A step checks once whether everything except
values is as the last step left it. If not, the flats are made again from the current tensors.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import is_, sub
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp2._torch import base_of, foreach_copy, grad_of, local_of, make_dtensor, make_spec, spec_of
from fsdp2.errors import ArgumentError
from fsdp2.optim.loading import own_part
from fsdp2.placement.carving import carve, end_to_end, from_on, place_of

__all__ = ["Flats", "Spans", "identical", "joined", "local_grad"]

State = dict[Any, Any]

_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


def identical(these: Iterable[Any], those: Sequence[Any]) -> bool:
    """Whether these are the same objects; `==` would compare the elements of tensors."""
    values = list(these)
    return len(values) == len(those) and all(map(is_, values, those))


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The local gradient of a DTensor parameter, with the parameter's placements."""
    if not isinstance(grad, DTensor):
        raise ArgumentError(
            f"a DTensor parameter of shape {tuple(param.shape)} has a gradient that is a plain {type(grad).__name__}: "
            "set a DTensor with the parameter's placements"
        )
    assert isinstance(param, DTensor)
    return local_of(grad if grad.placements == param.placements else grad.redistribute(placements=param.placements))


class Spans:
    """Joins dense views that lie end to end in their base tensor.

    Args:
        kinds: the kind of each tensor; only tensors of one kind are joined.

    Attributes:
        runs: for each joined tensor the indices of its parts, in memory order. The order of the runs does not depend
            on addresses, because ranks must add up norms in the same order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable] = ()):
        first_of: dict[Hashable, int] = {}
        keys = []
        for index, tensor in enumerate(tensors):
            base = base_of(tensor)
            is_dense = base is not None and tensor.is_contiguous() and tensor.is_floating_point()
            joins = is_dense and from_on(tensor, tensor.nbytes) is not None
            kind = (id(base), kinds[index] if kinds else None) if joins else index
            keys.append((first_of.setdefault(kind, index), tensor.data_ptr(), index))
        self.runs: list[list[int]] = []
        self._first_of = list(range(len(tensors)))
        end = None
        for first, start, index in sorted(keys):
            if (first, start) != end:
                self.runs.append([])
            self.runs[-1].append(index)
            self._first_of[index] = self.runs[-1][0]
            end = first, start + tensors[index].nbytes
        self._extents = [(run[0], len(run), sum(tensors[index].nbytes for index in run)) for run in self.runs]
        self._offsets = self._offsets_of(tensors)

    def over(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """One tensor for each run; None if these do not lie in their base tensors as the first ones did."""
        if self._offsets_of(tensors) != self._offsets:
            return None
        found = [tensors[at] if length == 1 else from_on(tensors[at], nbytes) for at, length, nbytes in self._extents]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def _offsets_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        addresses = list(map(_address_of, tensors))
        return list(map(sub, addresses, map(addresses.__getitem__, self._first_of)))


def joined(tensors: Sequence[torch.Tensor]) -> tuple[Spans, list[torch.Tensor]]:
    """The tensors, with views that lie end to end in their base tensor joined."""
    spans = Spans(tensors)
    found = spans.over(tensors)
    assert found is not None
    return spans, found


class Flat:
    """One parameter, or several whose shards and gradients lie end to end, with the same form of state.

    Attributes:
        local: the tensor that torch's optimizer sees, on the memory of the shards; `state` is its state.
    """

    def __init__(self, params: Sequence[DTensor], states: State):
        self.params = params
        self._bases = list(map(local_of, params))
        whole = end_to_end(self._bases)
        assert whole is not None
        self.local = whole.detach()
        self.local.grad_dtype = None  # any
        outers = [states[param] for param in params if param in states]
        self.state = {key: self._value([outer[key] for outer in outers]) for key in (outers or [{}])[0]}

    def _value(self, values: Sequence[Any]) -> Any:
        """One value for those of the parameters. Values that do not lie end to end, as after loading, are copied; of
        whole tensors (the state of one process) this rank's part is used."""
        first, shape = values[0], self.params[0].shape
        is_whole = isinstance(first, torch.Tensor) and first.ndim > 0 and first.shape == shape
        if not is_whole and not isinstance(first, DTensor):
            return first
        pairs = zip(values, self.params, strict=True)
        parts = [local_of(value) if isinstance(value, DTensor) else own_part(value, param) for value, param in pairs]
        whole = end_to_end(parts)
        if whole is None:
            whole = torch.empty_like(self.local, dtype=parts[0].dtype)
            foreach_copy(self._parts(whole), parts)
        return whole

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor like `local`."""
        pieces = carve(whole, [base.numel() for base in self._bases]) if len(self._bases) > 1 else [whole]
        return [piece.view(base.shape) for piece, base in zip(pieces, self._bases, strict=True)]

    def show(self, state: State, states: State) -> list[torch.Tensor]:
        """Take the state that a step has left, and show each parameter its part. If there are several parameters,
        returns a vector for each counter: each parameter shows one element, and the first one is in `state`."""
        outers, self.state = [states[param] for param in self.params], state
        counters = []
        olds = [dict(outer) for outer in outers]
        for outer in outers:
            outer.clear()
        for key, value in list(state.items()):
            shown: Sequence[Any] = [value] * len(outers)
            if isinstance(value, torch.Tensor) and value.shape == self.local.shape:
                shown = list(map(_distributed, self.params, self._parts(value), [old.get(key) for old in olds]))
            elif isinstance(value, torch.Tensor) and len(outers) > 1:
                counters.append(value.expand(len(outers)).clone())
                shown = counters[-1].unbind()
                state[key] = shown[0]
            for outer, each in zip(outers, shown, strict=True):
                outer[key] = each
        return counters


def _distributed(param: DTensor, local: torch.Tensor, old: Any) -> DTensor:
    """A DTensor like `param` on `local`, or `old` if that is on this memory already."""
    if isinstance(old, DTensor) and local_of(old).data_ptr() == local.data_ptr():
        return old
    return make_dtensor(local, make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype))


class Flats:
    """What an optimizer steps: its parameters, joined into as few tensors as possible.

    Args:
        groups: the parameters of each param group.
        states: the optimizer's state. Within a step it also has the states of `flats`.
        joins: whether parameters may be joined.

    Attributes:
        groups: for each param group, the tensors that torch's optimizer steps.
        flats: the DTensors that have gradients.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], states: State, joins: bool):
        self._states = states
        self._held = list(chain.from_iterable(groups))
        self._sizes = list(map(len, groups))
        sharded: Any = [param for param in self._held if isinstance(param, DTensor)]
        self._idle = [param for param in sharded if param.grad is None]
        self._params = params = [param for param in sharded if param.grad is not None]
        bases = list(map(local_of, params))
        self._addresses = list(map(_address_of, bases))
        grads = [local_grad(param, param.grad) for param in params]
        self._written = [*params, *bases]
        increment_version(self._written)
        is_placed = all(param.grad.placements == param.placements for param in params)
        self._specs = [spec_of(param.grad) for param in params] if is_placed else [None]  # nothing has that
        number = {id(param): index for index, each in enumerate(groups) for param in each}
        pairs = zip(params, grads, strict=True)
        kinds = [_kind(number[id(p)], p, grad, states.get(p, {})) if joins else id(p) for p, grad in pairs]
        self._spans = Spans(grads, kinds)
        self.flats = [Flat([params[index] for index in run], states) for run in self._spans.runs]
        seen = {id(flat.params[0]): flat.local for flat in self.flats}
        seen.update((id(param), param) for param in self._held if not isinstance(param, DTensor))
        self.groups = [[seen[id(param)] for param in each if id(param) in seen] for each in groups]
        self._outside: list[Any] = []  # what the last step left in the optimizer's state
        self._inside: list[Any] = [None]  # and in the states of `flats`
        self._outers: list[State] = []
        self._counters: list[torch.Tensor] = []
        self._firsts: list[torch.Tensor] = []  # of each counter that of the first parameter of its flat
        is_taken = self._take(grads)
        assert is_taken

    def fits(self, groups: Sequence[Sequence[torch.Tensor]], states: State) -> bool:
        """Take the gradients of another step. Returns False if anything but values has changed since the last one."""
        grads = list(map(grad_of, self._params))
        try:
            locals_, specs = list(map(local_of, grads)), list(map(spec_of, grads))
        except AttributeError:  # a gradient is missing, or not a DTensor
            return False
        is_same = states is self._states and list(map(len, groups)) == self._sizes
        if not is_same or not identical(self._now_outside(chain.from_iterable(groups), specs), self._outside):
            return False
        # As operations on the DTensors would: autograd must see that tensors which it may have saved have changed.
        increment_version(self._written)
        return (
            list(map(_address_of, map(local_of, self._params))) == self._addresses
            and all(param.grad is None for param in self._idle)
            and (not self._counters or torch.equal(torch.cat(self._counters), torch.cat(self._firsts)))
            and self._take(locals_)
        )

    def _take(self, grads: Sequence[torch.Tensor]) -> bool:
        found = self._spans.over(grads)
        for flat, grad in zip(self.flats, found or (), strict=found is not None):
            flat.local.grad = grad if grad.ndim else grad.view(1)
            if flat.state:
                self._states[flat.local] = flat.state
        return found is not None

    def leave(self) -> None:
        """After a step: show in the optimizer's state what changed in the states of `flats`; release the gradients."""
        states = [self._states.pop(flat.local, {}) for flat in self.flats]
        for flat in self.flats:
            flat.local.grad = None
        if not identical(_values(states), self._inside):
            changed = [(flat, state) for flat, state in zip(self.flats, states, strict=True) if state]
            ids = {id(param) for flat, _ in changed for param in flat.params}
            for param in self._params:  # the order must be equal on all ranks, for code that gathers states
                if id(param) in ids:
                    self._states.setdefault(param, {})
            self._counters = [vector for flat, state in changed for vector in flat.show(state, self._states)]
            self._outers = [self._states[param] for param in self._params if param in self._states]
            self._firsts = [counter[:1].expand(len(counter)) for counter in self._counters]
            self._inside, self._outside = _values(states), list(self._now_outside(self._held, self._specs))
        foreach_copy(self._counters, self._firsts)

    def _now_outside(self, held: Iterable[torch.Tensor], specs: Iterable[Any]) -> Iterable[Any]:
        """The objects that stay the same while only values change. (Includes the states of all parameters: looking one
        up takes longer than comparing it.)"""
        return chain(held, specs, self._states.values(), _values(self._outers))


def _values(states: Sequence[State]) -> list[Any]:
    """The values of all states. (The fastest iteration over dicts.)"""
    found: list[Any] = gc.get_referents(*states)
    return found


def _kind(group: int, param: DTensor, grad: torch.Tensor, state: State) -> Hashable:
    """Equal for parameters that can be joined if their gradients lie end to end: their shards do too, and they have the
    same group and the same form of state."""
    local = local_of(param)
    place = place_of(local)
    if place is None or grad.shape != local.shape or not local.is_contiguous():
        return id(param)
    form: list[Hashable] = [group, id(place[0]), place[1] - grad.storage_offset()]
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            is_number = not isinstance(value, DTensor) and not value.ndim
            form += [key, value.dtype, value.item() if is_number else None]
        else:
            form += [key, id(value)]
    return tuple(form)
