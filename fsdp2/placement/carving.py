"""Tensors that lie end to end in one block of memory, each with its own storage. Layer: placement.

    flat      [ a a a | b b | c c c c ]      one allocation
    carved    [ a a a ] [ b b ] [ c c c c ]

Views of `flat` would share its storage: saving one would write all, and changing one would count as changing all.
"""

from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import base_of

# Maps each carved tensor to the tensor that it was carved from, and to its first element there.
_carved = WeakIdKeyDictionary()


def carve(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """1-D tensors of `sizes` elements (none zero), end to end on the memory of `flat`, which must be 1-D, contiguous,
    on the CPU, and have ``sum(sizes)`` elements. It lives as long as any of them. Each has its own storage and version
    counter. (A DTensor on such a tensor can be deep-copied; on a view with a storage offset it cannot.)"""
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


def place_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The tensor that contains a carved one, or a view of it, and its first element there. None for other tensors, and
    if the carved one was given other memory (through `.data` or `share_memory_`)."""
    base = base_of(tensor)
    found: tuple[torch.Tensor, int] | None = _carved.get(tensor if base is None else base)
    if found is None or found[0].dtype is not tensor.dtype:
        return None
    whole, first = found[0], found[1] + int(tensor.storage_offset())
    return (whole, first) if whole.data_ptr() + first * whole.itemsize == tensor.data_ptr() else None


def from_on(first: torch.Tensor, nbytes: int) -> torch.Tensor | None:
    """A 1-D tensor on `nbytes` of memory, from the start of `first`, in its base or in what it was carved from. None if
    that does not have them. (`.data` and `share_memory_` give tensors other memory.)"""
    whole = base_of(first)
    if whole is None or whole.nbytes < nbytes:
        place = place_of(first)
        whole = None if place is None else place[0]
    if whole is None or (whole.ndim, whole.dtype) != (1, first.dtype) or not nbytes:
        return None
    start, numel = (first.data_ptr() - whole.data_ptr()) // whole.itemsize, nbytes // whole.itemsize
    if start == 0 and numel == whole.numel():
        return whole  # the usual case
    return whole[start : start + numel] if 0 <= start <= whole.numel() - numel else None


def end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One 1-D tensor on the memory of these tensors, if they lie end to end in this order in their base or in what they
    were carved from; otherwise None. A single tensor is returned as it is, but with a dim."""
    if len(tensors) == 1:
        return tensors[0] if tensors[0].ndim else tensors[0].view(1)
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
    return from_on(tensors[0], ends[-1] - starts[0]) if starts[1:] == ends[:-1] else None
