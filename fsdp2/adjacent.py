"""Tensors that are contiguous in memory, seen as one: an elementwise operation on the merged tensor equals the
operation on each of them, and costs one call. Layer: below the layout.

Neighbours are detected, never assumed: callers get merged tensors where they are contiguous, otherwise the originals.
Two kinds of tensors can be neighbours:

* views of one tensor, such as the gradients of a group, which its reduction leaves in one flat output;
* tensors that `carve` made, such as the shards of a group. Each has its own storage, so all other code sees ordinary
  tensors: saving one writes only that one, and no two look tied.
"""

from collections.abc import Callable, Sequence
from itertools import compress, count, pairwise
from operator import add, and_, attrgetter, eq, is_, itemgetter
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import base_of
from fsdp2.layout import dense_strides

_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_nbytes_of: Callable[[torch.Tensor], int] = attrgetter("nbytes")
_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")

# Maps each carved tensor to the tensor that it was carved from, and to its first element there.
_carved = WeakIdKeyDictionary()


def can_carve(tensor: torch.Tensor) -> bool:
    """Whether parts of `tensor` can have their own storages on its memory (through DLPack). Only on the CPU, until it
    has been tried elsewhere: code that records streams or shares handles with other processes expects whole
    allocations."""
    return type(tensor) is torch.Tensor and tensor.untyped_storage().device.type == "cpu"


def carve(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """1-D tensors of `sizes` elements (none zero), end to end on the memory of `flat`, which lives as long as one of
    them. Each has its own storage and version counter. (A DTensor on such a tensor can be deep-copied. On a view that
    does not begin where its storage does, it cannot, because torch mistakes the offset for an address.)

    Args:
        flat: 1-D, contiguous, of ``sum(sizes)`` elements; `can_carve`.
    """
    pieces, start = [], 0
    base = base_of(flat)
    whole, first = _carved.get(flat if base is None else base, (flat if base is None else base, 0))
    first += int(flat.storage_offset())
    with torch.inference_mode(False), torch.no_grad():
        for size in sizes:
            piece = from_dlpack(flat[start : start + size])
            _carved[piece] = whole, first + start
            pieces.append(piece)
            start += size
    return pieces


def carved_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The carved tensor at whose start `tensor` begins, if `tensor` has no gaps; otherwise None."""
    base = base_of(tensor)
    if base is None or base not in _carved or tensor.storage_offset() or not tensor.is_contiguous():
        return None
    return base if base.dtype is tensor.dtype else None


def place_of(piece: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The tensor that a carved `piece` lies in, and its first element there; None for other tensors, and once `piece`
    has other memory (through `.data` or `share_memory_`)."""
    found: tuple[torch.Tensor, int] | None = _carved.get(piece)
    if found is None or found[0].data_ptr() + found[1] * piece.itemsize != piece.data_ptr():
        return None
    return found


class Span(NamedTuple):
    """The addresses of a dense tensor's elements, from the first up to `end`, in the storage of `whole`, which is of
    the same dtype."""

    whole: torch.Tensor
    address: int
    end: int


def span_of(tensor: torch.Tensor) -> Span | None:
    """The span of `tensor`; None if there are gaps between its elements, or it is not part of a larger tensor."""
    base = base_of(tensor)
    whole, _ = _carved.get(tensor if base is None else base, (base, 0))
    if whole is None or whole.dtype is not tensor.dtype or not _is_dense(tensor):
        return None
    address = tensor.data_ptr()
    return Span(whole, address, address + tensor.nbytes) if over(whole, address, tensor.nbytes) is not None else None


def over(whole: torch.Tensor, address: int, nbytes: int) -> torch.Tensor | None:
    """The elements at these addresses, 1-D; None if they are not in the storage of `whole`. (The tensors may have been
    given other memory, through `.data` or `share_memory_`.)"""
    storage = whole.untyped_storage()
    offset, itemsize = address - storage.data_ptr(), whole.itemsize
    if offset < 0 or offset + nbytes > storage.nbytes() or offset % itemsize:
        return None
    return whole.as_strided((nbytes // itemsize,), (1,), offset // itemsize)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or dense_strides(tensor.shape, tensor.stride()) == tensor.stride()


class Run(NamedTuple):
    """Neighbours in memory.

    Attributes:
        tensor: a 1-D tensor over all of them; a tensor without neighbours is returned itself.
        indices: the indices of the tensors, in memory order.
    """

    tensor: torch.Tensor
    indices: list[int]


class _Seen(NamedTuple):
    """How a list of tensors was divided into runs, each of which was all of one base.

    Attributes:
        arrange: puts a list of as many tensors into memory order.
        firsts: the index of the first tensor of each run, in that order.
        indices: of the runs.
    """

    arrange: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    firsts: list[int]
    indices: list[list[int]]


# What the last list of each length looked like: the next step's gradients are the same parts of other bases. Only a
# guess, which `_seen_again` checks.
_seen: dict[int, _Seen] = {}
_FEW, _MANY = 8, 1000  # lists that are shorter are not worth it; how many guesses to keep


def runs_of(tensors: Sequence[torch.Tensor]) -> list[Run]:
    """The tensors as runs, as few as possible; each tensor is in one. Their order depends on the order of the tensors
    and on which are neighbours, never on addresses, because ranks must add up norms in the same order. (Uses operations
    on whole lists, since clipping does this for all gradients in each step.)"""
    seen = _seen.get(len(tensors))
    found = None if seen is None else _seen_again(seen, tensors)
    if found is None:
        found = _runs_of(tensors)
        _remember(found, tensors)
    return found


def _seen_again(seen: _Seen, tensors: Sequence[torch.Tensor]) -> list[Run] | None:
    """The runs of `tensors`, if they are those of the list that was seen; otherwise None."""
    arranged = seen.arrange(tensors)
    bases = list(map(base_of, arranged))
    wholes = [bases[first] for first in seen.firsts]
    if len({*map(id, wholes)}) < len(wholes) or len({*map(_dtype_of, arranged)}) > 1:
        return None
    addresses = list(map(_address_of, arranged))
    ends = list(map(add, addresses, map(_nbytes_of, arranged)))
    follows = map(and_, map(is_, bases[1:], bases), map(eq, addresses[1:], ends))
    if [0, *(after for after, goes_on in enumerate(follows, 1) if not goes_on)] != seen.firsts:
        return None
    lasts = [*(first - 1 for first in seen.firsts[1:]), -1]
    runs = []
    for whole, first, last, indices in zip(wholes, seen.firsts, lasts, seen.indices, strict=True):
        if whole is None or not _is_all_of(whole, addresses[first], ends[last]):
            return None
        runs.append(Run(whole, indices))
    return runs if all(map(_is_contiguous, arranged)) and _dtype_of(runs[0].tensor) is _dtype_of(arranged[0]) else None


def _is_all_of(whole: torch.Tensor, address: int, end: int) -> bool:
    return whole.data_ptr() == address and whole.nbytes == end - address and whole.ndim == 1 and whole not in _carved


def _remember(runs: Sequence[Run], tensors: Sequence[torch.Tensor]) -> None:
    """Note the runs for `_seen_again`, if that can find such."""
    if len(tensors) < _FEW or len(runs) == len(tensors):
        return
    order = [index for run in runs for index in run.indices]
    firsts = [0]
    for run in runs[:-1]:
        firsts.append(firsts[-1] + len(run.indices))
    if len(_seen) >= _MANY:
        _seen.clear()
    _seen[len(tensors)] = _Seen(itemgetter(*order), firsts, [run.indices for run in runs])


def _runs_of(tensors: Sequence[torch.Tensor]) -> list[Run]:
    bases = [tensor if base is None else base for tensor, base in zip(tensors, map(base_of, tensors), strict=True)]
    distinct = dict(zip(map(id, bases), bases, strict=True))
    origins = {key: _carved.get(base, (base, 0))[0] for key, base in distinct.items()}
    numbers = dict(zip(dict.fromkeys(map(id, origins.values())), count()))  # by first appearance
    wholes = list({id(whole): whole for whole in origins.values()}.values())
    number_of = {key: numbers[id(whole)] for key, whole in origins.items()}
    keys = map(number_of.__getitem__, map(id, bases))
    addresses = list(map(_address_of, tensors))
    ends = map(add, addresses, map(_nbytes_of, tensors))
    spans = list(zip(keys, addresses, ends, count()))
    result = []
    if not all(map(_is_contiguous, tensors)) or len({each.dtype for each in (*tensors, *wholes)}) > 1:
        fit = [
            wholes[span[0]].dtype is each.dtype and _is_dense(each) for span, each in zip(spans, tensors, strict=True)
        ]
        result = [Run(tensor, [index]) for index, tensor in enumerate(tensors) if not fit[index]]
        spans = list(compress(spans, fit))
    spans.sort()
    breaks = [after for after in range(1, len(spans)) if spans[after - 1][::2] != spans[after][:2]]
    for first, after in pairwise([0, *breaks, len(spans)] if spans else []):
        indices = [index for _, _, _, index in spans[first:after]]
        key, address, _, _ = spans[first]
        joined = over(wholes[key], address, spans[after - 1][2] - address) if after > first + 1 else None
        if joined is None:
            result += [Run(tensors[index], [index]) for index in indices]
        else:
            result.append(Run(joined, indices))
    return result
