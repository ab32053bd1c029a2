"""Tensors that lie end to end in memory, as one: an elementwise operation on it equals the operation on each of them,
and costs one call. Layer: optim, below local.

The small shards of a unit are carved from one block of memory (`carving.py`), and its gradients are views of what
its reduction wrote. `Flats` are the parameters of a param group as a step sees them. Outside, each parameter has its
own state, on parts of the same memory. The outside is authoritative: each step compares it with what the last one left,
and makes other flats if it differs.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
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


class Spans:
    """Lists of tensors that lie end to end, each of which one tensor stands for.

    Args:
        tensors: all of them.
        runs: the indices in each list, in memory order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: Sequence[Sequence[int]]):
        self._runs = [(run[0], len(run), sum(tensors[index].nbytes for index in run)) for run in runs]
        first_of = {index: run[0] for run in runs for index in run}
        self._first_of = [first_of[index] for index in range(len(tensors))]
        self._offsets = self._offsets_of(tensors)

    def over(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """One tensor for each list, if these, which have the same shapes, lie as the first ones did, and are views of
        what they lie in; otherwise None. (Uses operations on whole lists, since each step does this twice.)"""
        found: list[torch.Tensor] = []
        for first, length, nbytes in self._runs if self._offsets_of(tensors) == self._offsets else ():
            one, base = tensors[first], base_of(tensors[first])
            over = one if length == 1 else None if base is None else span(base, one.data_ptr(), nbytes)
            found += [] if over is None else [over]
        return found if len(found) == len(self._runs) else None

    def _offsets_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        addresses = list(map(_address_of, tensors))
        return list(map(sub, addresses, map(addresses.__getitem__, self._first_of)))


def span(whole: torch.Tensor, start: int, nbytes: int) -> torch.Tensor | None:
    """The elements from an address on, 1-D; None if `whole` does not lie there. (`.data` and `share_memory_` give
    tensors other memory.)"""
    if whole.ndim == 1 and whole.nbytes == nbytes and whole.data_ptr() == start:
        return whole  # as a rule: the gradients of a unit are all of what its reduction wrote
    storage, itemsize = whole.untyped_storage(), whole.itemsize
    offset = start - storage.data_ptr()
    if offset < 0 or offset + nbytes > storage.nbytes():
        return None
    return whole.as_strided((nbytes // itemsize,), (1,), offset // itemsize)


def runs_of(tensors: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor | None]) -> list[list[int]]:
    """The indices of the tensors, in lists of those that lie end to end in the same one of `wholes`, in memory order.
    The order of the lists never depends on addresses, because ranks must add up norms in the same order."""
    groups: dict[int, list[int]] = {}
    for index, (tensor, whole) in enumerate(zip(tensors, wholes, strict=True)):
        is_dense = tensor.is_contiguous() or dense_strides(tensor.shape, tensor.stride()) == tensor.stride()
        is_part = whole is not None and whole.dtype == tensor.dtype and is_dense and tensor.numel() > 0
        if whole is None or not is_part or span(whole, tensor.data_ptr(), tensor.nbytes) is None:
            groups[-1 - index] = [index]
        else:
            groups.setdefault(id(whole), []).append(index)
    runs: list[list[int]] = []
    for group in groups.values():
        end = None
        for start, index in sorted((tensors[index].data_ptr(), index) for index in group):
            if start == end:
                runs[-1].append(index)
            else:
                runs.append([index])
            end = start + tensors[index].nbytes
    return runs


def joined(tensors: Sequence[torch.Tensor]) -> tuple[Spans, list[torch.Tensor]]:
    """The tensors, with one in place of views that lie end to end in what they are views of."""
    spans = Spans(tensors, runs_of(tensors, list(map(base_of, tensors))))
    found = spans.over(tensors)
    assert found is not None
    return spans, found


def _over_carved(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor over carved ones, if they lie end to end in this order."""
    place, starts = place_of(tensors[0]), list(map(_address_of, tensors))
    ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
    if len(tensors) == 1:
        return tensors[0]
    return None if place is None or starts[1:] != ends[:-1] else span(place[0], starts[0], ends[-1] - starts[0])


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
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


class Flat:
    """One parameter, or several whose shards lie end to end, with gradients that do too, and states of the same kind.

    Attributes:
        local: the tensor that the torch optimizer sees: another one on the memory of the shards. A 0-dim one gets one
            dim, so that its state differs from counters.
        state: the state that the torch optimizer sees; None before there is any.
        counters: by key those of the parameters, in one vector; the rest of it; and the first one, which is in `state`,
            as often.
    """

    def __init__(self, params: Sequence[DTensor], states: Mapping[Any, State]):
        self.params = params
        self.bases = list(map(local_of, params))
        over = _over_carved(self.bases)
        assert over is not None
        self.local = over.detach() if over.ndim else over.detach().view(1)
        outers = [states[param] for param in params if param in states]
        self.state: State | None = {} if outers else None
        self.counters: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for key in outers[0] if outers else ():
            self._take(key, outers)
        self._known = dict(self.state or {})

    def leave(self, states: State, inner: State) -> bool:
        """After a step, which left `inner`: update the state outside, and release the gradient. Returns whether other
        objects are there now."""
        self.local.grad = None
        now: State | None = inner.pop(self.local, None)
        if now is None or (now is self.state and identical(now.values(), list(self._known.values()))):
            return False
        self.state = now
        outers = [states.setdefault(param, {}) for param in self.params]
        for outer in outers:
            for key in outer.keys() - now.keys():
                del outer[key]
        for key, value in list(now.items()):
            if self._known.get(key, self) is not value:
                self._show(key, value, outers)
        self._known = dict(now)
        return True

    def _take(self, key: Any, outers: Sequence[State]) -> None:
        """Put one value into `state`, from those of the parameters."""
        assert self.state is not None
        values = [outer[key] for outer in outers]
        value = values[0]
        if isinstance(value, DTensor):
            locals_ = list(map(local_tensor, values))
            if (over := _over_carved(locals_)) is not None:
                self.state[key] = over if over.ndim else over.view(1)
                return
            value = torch.empty_like(self.local, dtype=value.dtype)
            for piece, local in zip(self._pieces(value), locals_, strict=True):
                piece.copy_(local)
        elif isinstance(value, torch.Tensor) and value.ndim and value.shape == self.params[0].shape:
            value = own_part(value, self.params[0])
        elif len(values) == 1 or not isinstance(value, torch.Tensor):
            self.state[key] = value
            return
        self.state[key] = value
        self._show(key, value, outers)

    def _show(self, key: Any, value: Any, outers: Sequence[State]) -> None:
        """Put the value in `state` into the states outside."""
        assert self.state is not None
        shown: Sequence[Any] = [value] * len(outers)
        if isinstance(value, torch.Tensor) and value.shape == self.local.shape:
            shown = list(map(_distributed, self._pieces(value), self.params))
        elif isinstance(value, torch.Tensor) and len(self.params) > 1:
            vector = value.expand(len(self.params)).clone()
            shown = [*vector.unbind()]
            self.state[key] = shown[0]
            self.counters[key] = vector, vector[1:], vector[:1].expand(len(vector) - 1)
        for outer, each in zip(outers, shown, strict=True):
            outer[key] = each

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor like `local`, with the parameter's shape."""
        if len(self.bases) == 1:
            return [whole.view(self.bases[0].shape)]
        pieces = carve(whole, [base.numel() for base in self.bases])
        return [piece.as_strided(base.shape, base.stride()) for piece, base in zip(pieces, self.bases, strict=True)]


def _distributed(local: torch.Tensor, param: DTensor) -> DTensor:
    return make_dtensor(local, make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype))


class Flats:
    """The parameters of one param group with this step's gradients, as few tensors as possible.

    Args:
        held: the parameters.
        states: the optimizer's state.
        joins: whether a tensor may be over several of them.

    Attributes:
        flats: the DTensors that have gradients.
        plain: the parameters that are no DTensors.
        written: what a step changes: the DTensors, and their local tensors.
    """

    def __init__(self, held: Sequence[torch.Tensor], states: Mapping[Any, State], joins: bool):
        self._held = [*held]
        self.plain = [param for param in held if not isinstance(param, DTensor)]
        self._idle = [param for param in held if isinstance(param, DTensor) and param.grad is None]
        params = [param for param in held if isinstance(param, DTensor) and param.grad is not None]
        grads = [local_grad(param, param.grad) for param in params if param.grad is not None]
        chains = _chains(params, grads, states) if joins else [[index] for index in range(len(params))]
        self.flats = [Flat([params[index] for index in indices], states) for indices in chains]
        self._params = [param for flat in self.flats for param in flat.params]
        self._bases = [base for flat in self.flats for base in flat.bases]
        self.written = [*self._params, *self._bases]
        self._pointers = list(map(_address_of, self._bases))
        grads = [grads[index] for indices in chains for index in indices]
        ends = list(accumulate(map(len, chains)))
        self._spans = Spans(grads, [range(end - len(each), end) for end, each in zip(ends, chains, strict=True)])
        self._left: list[Any] | None = None  # what the last step left
        self._outers: list[State] = []
        self._first_of: list[int] = []  # of each counter, that of the first parameter of its flat
        self._recurs = identical(map(local_of, map(grad_of, self._params)), grads)
        self._take(grads)

    def enter(self, held: Sequence[torch.Tensor], states: Mapping[Any, State]) -> bool:
        """Take the gradients of another step, if nothing else has changed. Otherwise returns False."""
        grads = list(map(grad_of, self._params))
        try:
            locals_ = list(map(local_of, grads))
        except AttributeError:  # there is none, or one that is no DTensor
            return False
        vectors = [vector for vector, _, _ in self._counters()]
        counters = torch.cat(vectors).tolist() if vectors else []
        return (
            self._left is not None
            and identical(self._now(held, grads, states), self._left)
            and list(map(_address_of, self._bases)) == self._pointers
            and all(param.grad is None for param in self._idle)
            and counters == list(map(counters.__getitem__, self._first_of))
            and self._take(locals_)
        )

    def _take(self, grads: Sequence[torch.Tensor]) -> bool:
        found = self._spans.over(grads)
        for flat, grad in zip(self.flats, found or (), strict=found is not None):
            if grad.dtype != flat.local.dtype:
                flat.local.grad_dtype = grad.dtype
            flat.local.grad = grad if grad.ndim else grad.view(1)
        return found is not None

    def leave(self, states: State, inner: State) -> bool:
        """After a step, which left `inner`: take from it what belongs to these parameters. Returns whether other
        objects are outside now. New states are in the order of the parameters. It is the same on all ranks, and code
        that gathers states depends on it."""
        new: set[torch.Tensor] = {param for param in self.plain if param in inner and param not in states}
        new.update(param for flat in self.flats if flat.state is None and flat.local in inner for param in flat.params)
        for param in self._held if new else ():
            if param in new:
                states.setdefault(param, {})
        changed = [flat.leave(states, inner) for flat in self.flats]
        counters = self._counters()
        foreach_copy([rest for _, rest, _ in counters], [first for _, _, first in counters])
        return any(changed) or bool(new) or self._left is None

    def note(self, states: Mapping[Any, State]) -> None:
        """Remember what the step has left."""
        self._outers = [states[param] for param in self._params if param in states]
        sizes = [len(vector) for vector, _, _ in self._counters()]
        starts = accumulate([0, *sizes[:-1]])
        self._first_of = [start for start, size in zip(starts, sizes, strict=False) for _ in range(size)]
        if self._recurs:
            self._left = self._now(self._held, list(map(grad_of, self._params)), states)

    def _counters(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [each for flat in self.flats for each in flat.counters.values()]

    def _now(self, held: Sequence[torch.Tensor], grads: Sequence[Any], states: Mapping[Any, State]) -> list[Any]:
        """The objects that stay the same while nothing but values changes. (The states of all parameters, because to
        look one up takes longer than to compare it.)"""
        values = chain.from_iterable(map(dict.values, self._outers))
        return [*held, *map(local_of, self._params), *map(spec_of, grads), *states.values(), *values]


def _chains(params: Sequence[DTensor], grads: Sequence[torch.Tensor], states: Mapping[Any, State]) -> list[list[int]]:
    """The indices of the parameters, in lists of those that one tensor can stand for."""
    forms = [_form(*each) for each in zip(params, grads, map(states.get, params), strict=True)]
    bases = list(map(local_of, params))
    places = [None if form is None else place_of(base) for form, base in zip(forms, bases, strict=True)]
    shards = runs_of(bases, [place and place[0] for place in places])
    follows = {pair for run in runs_of(grads, list(map(base_of, grads))) for pair in pairwise(run)}
    chains: list[list[int]] = []
    for run in shards:
        for index in run:
            last = chains[-1][-1] if chains and index != run[0] else -1
            if (last, index) in follows and forms[last] == forms[index]:
                chains[-1].append(index)
            else:
                chains.append([index])
    return chains


def _form(param: DTensor, grad: torch.Tensor, state: State | None) -> Hashable:
    """Equal for parameters that one tensor can stand for, with their gradients and states, if they lie end to end. None
    if no other tensor can stand for this one."""

    def layout(tensor: torch.Tensor) -> Hashable:
        return tensor.shape, tensor.stride(), tensor.device

    local = local_of(param)
    if place_of(local) is None or layout(grad) != layout(local) or grad.is_conj() or grad.is_neg():
        return None
    kinds: list[Hashable] = [grad.dtype, state is None]
    for key, value in () if state is None else state.items():
        if isinstance(value, DTensor):
            if layout(local_tensor(value)) != layout(local) or value.placements != param.placements:
                return None
            kinds.append((key, value.dtype))
        elif isinstance(value, torch.Tensor):
            if value.ndim:
                return None
            kinds.append((key, value.dtype, value.device, value.item()))
        elif value is None or isinstance(value, (bool, int, float, str)):
            kinds.append((key, value))
        else:
            return None
    return tuple(kinds)
