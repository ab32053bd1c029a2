"""Tensors that lie end to end in memory, as one: an elementwise operation on it equals the operation on each of them,
and costs one call. Layer: optim, below local.

    shards     [ a a a ] [ b b ] [ c ]    each with its own storage, carved from one block (`carving.py`)
    gradients  [ a a a     b b     c ]    views of what one reduction wrote
    a `Flat`   [ a a a     b b     c ]    what torch's optimizer sees: one parameter, one gradient, one state

Each parameter shows its own state: parts of the flat one, and counters. A step asks once whether all is as the last one
left it, but for values. If not, flats are made again, from what is there.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import is_, sub
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import base_of, foreach_copy, grad_of, local_of, local_tensor, make_dtensor, make_spec, spec_of
from fsdp2.errors import ArgumentError
from fsdp2.layout import dense_strides
from fsdp2.optim.loading import own_part
from fsdp2.placement.carving import carve, place_of

__all__ = ["Flats", "identical", "joined", "local_grad"]

State = dict[Any, Any]

_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


def identical(these: Iterable[Any], those: Sequence[Any]) -> bool:
    """Whether these are the same objects; `==` would compare the elements of tensors."""
    values = list(these)
    return len(values) == len(those) and all(map(is_, values, those))


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The local gradient of a DTensor parameter, placed as that is."""
    if not isinstance(grad, DTensor):
        raise ArgumentError(
            f"a DTensor parameter of shape {tuple(param.shape)} has a gradient that is a plain {type(grad).__name__}: "
            "set a DTensor with the parameter's placements"
        )
    assert isinstance(param, DTensor)
    return local_of(grad if grad.placements == param.placements else grad.redistribute(placements=param.placements))


def _span(whole: torch.Tensor, start: int, nbytes: int) -> torch.Tensor | None:
    """The elements from an address on, 1-D; None if `whole` does not lie there. (`.data` and `share_memory_` give
    tensors other memory.)"""
    if whole.ndim == 1 and whole.nbytes == nbytes and whole.data_ptr() == start:
        return whole  # as a rule: the gradients of a unit are all of what its reduction wrote
    storage, itemsize = whole.untyped_storage(), whole.itemsize
    offset = start - storage.data_ptr()
    if offset < 0 or offset + nbytes > storage.nbytes():
        return None
    return whole.as_strided((nbytes // itemsize,), (1,), offset // itemsize)


class Spans:
    """Tensors of which one can stand for several: for views that lie end to end in what they are views of.

    Args:
        kinds: of each tensor; only those of one kind are joined.

    Attributes:
        runs: the indices, in lists of those that one stands for, as they lie in memory. The order of the lists does not
            depend on addresses, because ranks must add up norms in the same order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable] | None = None):
        first_in: dict[int, int] = {}
        keys = []
        for index, tensor in enumerate(tensors):
            base, start = base_of(tensor), tensor.data_ptr()
            is_dense = tensor.is_contiguous() or dense_strides(tensor.shape, tensor.stride()) == tensor.stride()
            is_part = base is not None and base.dtype == tensor.dtype and is_dense and tensor.numel() > 0
            if base is None or not is_part or _span(base, start, tensor.nbytes) is None:
                keys.append((index, start, index))
            else:
                keys.append((first_in.setdefault(id(base), index), start, index))
        self.runs: list[list[int]] = []
        self._first_of = list(range(len(tensors)))
        end: Hashable = None
        for whole, start, index in sorted(keys):
            kind = None if kinds is None else kinds[index]
            if (whole, start, kind) != end:
                self.runs.append([])
            self.runs[-1].append(index)
            self._first_of[index] = self.runs[-1][0]
            end = whole, start + tensors[index].nbytes, kind
        self._extents = [(run[0], len(run), sum(tensors[index].nbytes for index in run)) for run in self.runs]
        self._offsets = self._offsets_of(tensors)

    def over(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """One tensor for each run; None if these do not lie as the first ones did, in what they are views of."""
        found: list[torch.Tensor] = []
        for first, length, nbytes in self._extents if self._offsets_of(tensors) == self._offsets else ():
            one, base = tensors[first], base_of(tensors[first])
            over = one if length == 1 else None if base is None else _span(base, one.data_ptr(), nbytes)
            found += [] if over is None else [over]
        return found if len(found) == len(self.runs) else None

    def _offsets_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        addresses = list(map(_address_of, tensors))
        return list(map(sub, addresses, map(addresses.__getitem__, self._first_of)))


def joined(tensors: Sequence[torch.Tensor]) -> tuple[Spans, list[torch.Tensor]]:
    """The tensors, with one in place of views that lie end to end in what they are views of."""
    spans = Spans(tensors)
    found = spans.over(tensors)
    assert found is not None
    return spans, found


def _over_carved(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor over carved ones, if they lie end to end in this order. It has a dim, which tells it from counters."""
    if len(tensors) == 1:
        return tensors[0] if tensors[0].ndim else tensors[0].view(1)
    place, starts = place_of(tensors[0]), list(map(_address_of, tensors))
    ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
    return None if place is None or starts[1:] != ends[:-1] else _span(place[0], starts[0], ends[-1] - starts[0])


class Flat:
    """One parameter, or several whose shards lie end to end, with gradients that do too, and states of the same kind.

    Attributes:
        local: the tensor that torch's optimizer sees, on the memory of the shards; and `state`, its state.
        counters: by key, those of the parameters in one vector. The first one is in `state`.
    """

    def __init__(self, params: Sequence[DTensor], states: State):
        self.params = params
        self.bases = list(map(local_of, params))
        over = _over_carved(self.bases)
        assert over is not None
        self.local = over.detach()
        self.counters: dict[Any, torch.Tensor] = {}
        self._shown: State = {}  # what of `state` the states outside show
        outers = [states[param] for param in params if param in states]
        self.state = {key: self._joined(key, [outer[key] for outer in outers]) for key in (outers or [{}])[0]}
        if outers:
            self.show(states, self.state)

    def _joined(self, key: Any, values: Sequence[Any]) -> Any:
        """A value for `state`, from those outside."""
        value: Any = values[0]
        if isinstance(value, DTensor):
            locals_ = list(map(local_tensor, values))
            value = _over_carved(locals_)
            if value is None:  # they were loaded
                value = torch.empty_like(self.local, dtype=locals_[0].dtype)
                foreach_copy(self._parts(value), locals_)
                return value
        elif isinstance(value, torch.Tensor) and value.ndim and value.shape == self.params[0].shape:
            return own_part(value, self.params[0])  # loaded too, from one process
        elif isinstance(value, torch.Tensor) and len(values) > 1:
            return value
        self._shown[key] = value
        return value

    def show(self, states: State, now: State) -> None:
        """Let the states outside show this one."""
        outers = [states.setdefault(param, {}) for param in self.params]
        for outer in outers:
            for key in outer.keys() - now.keys():
                del outer[key]
        for key, value in list(now.items()):
            if self._shown.get(key, self) is value:
                continue
            shown: Sequence[Any] = [value] * len(outers)
            if isinstance(value, torch.Tensor) and value.shape == self.local.shape:
                shown = list(map(_distributed, self._parts(value), self.params))
            elif isinstance(value, torch.Tensor) and len(outers) > 1:
                self.counters[key] = value.expand(len(outers)).clone()
                shown = self.counters[key].unbind()
                now[key] = shown[0]
            for outer, each in zip(outers, shown, strict=True):
                outer[key] = each
        self._shown = dict(now)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor like `local`, with the parameter's shape."""
        if len(self.bases) == 1:
            return [whole.view(self.bases[0].shape)]
        pieces = carve(whole, [base.numel() for base in self.bases])
        return [piece.as_strided(base.shape, base.stride()) for piece, base in zip(pieces, self.bases, strict=True)]


def _distributed(local: torch.Tensor, param: DTensor) -> DTensor:
    return make_dtensor(local, make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype))


class Flats:
    """What an optimizer steps: its parameters, as few tensors as possible.

    Args:
        groups: the parameters of each param group.
        states: the optimizer's state.
        joins: whether a tensor may be over several of them.

    Attributes:
        groups, state: what torch's optimizer sees in a step.
        flats: the DTensors that have gradients.
        written: these DTensors, and their local tensors.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], states: State, joins: bool):
        self._held = list(chain.from_iterable(groups))
        self._sizes = list(map(len, groups))
        group_of = {id(param): index for index, params in enumerate(groups) for param in params}
        used: Any = [param for param in self._held if isinstance(param, DTensor) and param.grad is not None]
        self._idle = [param for param in self._held if isinstance(param, DTensor) and param.grad is None]
        self._params, self._bases = used, list(map(local_of, used))
        self.written = [*self._params, *self._bases]
        self._addresses = list(map(_address_of, self._bases))
        grads = [local_grad(param, param.grad) for param in used]
        specs = [(spec_of(param.grad), param.placements) for param in used]
        self._specs = [spec if spec.placements == own else None for spec, own in specs]  # None: redistribute each time
        kinds: list[Hashable] = [*range(len(used))]
        for index, param in enumerate(used if joins else ()):
            kinds[index] = _form(group_of[id(param)], param, grads[index], states.get(param)) or index
        self._spans = Spans(grads, kinds)
        self.flats = [Flat([used[index] for index in run], states) for run in self._spans.runs]
        plain = [param for param in self._held if not isinstance(param, DTensor)]
        self.groups: list[list[torch.Tensor]] = [[] for _ in groups]
        for first, seen in [*((flat.params[0], flat.local) for flat in self.flats), *zip(plain, plain, strict=True)]:
            self.groups[group_of[id(first)]].append(seen)
        self.state: State = defaultdict(dict, {flat.local: flat.state for flat in self.flats if flat.state})
        self.state.update((param, states[param]) for param in plain if param in states)
        self._left: tuple[list[Any], list[Any]] | None = None  # what the last step left outside and inside
        self._outers: list[State] = []
        self._counters: list[torch.Tensor] = []
        self._firsts: list[torch.Tensor] = []  # of each counter that of the first parameter of its flat
        self._take(grads)

    def fits(self, groups: Sequence[Sequence[torch.Tensor]], states: State) -> bool:
        """Take the gradients of another step, if all but values is as the last one left it. Otherwise returns False."""
        grads = list(map(grad_of, self._params))
        try:
            locals_, specs = list(map(local_of, grads)), list(map(spec_of, grads))
        except AttributeError:  # there is none, or one that is no DTensor
            return False
        return (
            self._left is not None
            and list(map(len, groups)) == self._sizes
            and identical(self._outside(chain.from_iterable(groups), specs, states), self._left[0])
            and list(map(_address_of, self._bases)) == self._addresses
            and all(param.grad is None for param in self._idle)
            and (not self._counters or torch.equal(torch.cat(self._counters), torch.cat(self._firsts)))
            and self._take(locals_)
        )

    def leave(self, states: State) -> None:
        """After a step: show outside what it changed in `state`, and release the gradients. New states are in the order
        of the parameters. It is the same on all ranks, and code that gathers states depends on it."""
        for flat in self.flats:
            flat.local.grad = None
        if self._left is None or not identical(self._inside(), self._left[1]):
            inside = {id(param): flat.local for flat in self.flats for param in flat.params}
            for param in self._held:
                if inside.get(id(param), param) in self.state:
                    states.setdefault(param, {})
            for flat in self.flats:
                if flat.local in self.state:
                    flat.show(states, self.state[flat.local])
            hidden = {flat.local for flat in self.flats}
            states.update((key, value) for key, value in self.state.items() if key not in hidden)
            self._outers = [states[param] for param in self._params if param in states]
            self._counters = [counter for flat in self.flats for counter in flat.counters.values()]
            self._firsts = [counter[:1].expand(len(counter)) for counter in self._counters]
            self._left = [*self._outside(self._held, self._specs, states)], self._inside()
        foreach_copy(self._counters, self._firsts)

    def _take(self, grads: Sequence[torch.Tensor]) -> bool:
        found = self._spans.over(grads)
        for flat, grad in zip(self.flats, found or (), strict=found is not None):
            if grad.dtype != flat.local.dtype:
                flat.local.grad_dtype = grad.dtype
            flat.local.grad = grad if grad.ndim else grad.view(1)
        return found is not None

    def _outside(self, held: Iterable[torch.Tensor], specs: Iterable[Any], states: State) -> Iterable[Any]:
        """The objects that stay the same while nothing but values changes. (The states of all parameters, because to
        look one up takes longer than to compare it.)"""
        values = chain.from_iterable(map(dict.values, self._outers))
        return chain(held, map(local_of, self._params), specs, states.values(), values)

    def _inside(self) -> list[Any]:
        return [*self.state.values(), *chain.from_iterable(map(dict.values, self.state.values()))]


def _form(group: int, param: DTensor, grad: torch.Tensor, state: State | None) -> tuple[Hashable, ...] | None:
    """Equal for parameters whose gradients lie end to end, if one tensor can stand for them: shards that lie likewise,
    the same group, and states of the same kinds. None if no other tensor can stand for this one."""

    def layout(tensor: torch.Tensor) -> Hashable:
        return tensor.shape, tensor.stride(), tensor.device

    local = local_of(param)
    place = place_of(local)
    if place is None or layout(grad) != layout(local) or grad.is_conj() or grad.is_neg():
        return None
    form: list[Hashable] = [group, id(place[0]), place[1] - grad.storage_offset(), state is None]
    for key, value in (state or {}).items():
        kind: Hashable = id(value)
        if isinstance(value, DTensor):
            if layout(local_tensor(value)) == layout(local) and value.placements == param.placements:
                kind = value.dtype
        elif isinstance(value, torch.Tensor) and not value.ndim:
            kind = value.dtype, value.device, value.item()
        form.append((key, kind))
    return tuple(form)
