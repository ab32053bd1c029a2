"""Writes through a slice of a sharded tensor, which DTensor alone would lose. Layer: init.

``weight[3]`` and ``weight[:2]`` are views, so writing to them changes `weight`. For a DTensor that is sharded along the
sliced dim this fails: DTensor gathers the whole tensor and returns a copy of the slice, and values written to it (the
zeros of `nn.Embedding`'s padding row, the ones of `nn.init.dirac_`) are silently lost. Here such slices are copies too,
but only the slice is gathered. Each copy is recorded with the region that it was copied from, and after a write to it
the owners of the elements copy them back.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp2._torch import local_tensor
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.init.operands import whole_of
from fsdp2.placement.tiling import own_box

__all__ = ["SLICING", "Slices", "cuts_sliced_dim", "viewed"]

aten = torch.ops.aten

SLICING = (aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class Region:
    """A rectangle of a DTensor, of which every rank has a copy.

    Attributes:
        entries: the entries of each dim, or the single entry of a dim that the copy lacks. None for any other kind of
            view, which cannot be written through.
        reshaped: whether the copy has another shape than the rectangle, with the elements in the same order.
    """

    base: DTensor
    entries: tuple[range | int, ...] | None
    reshaped: bool = False

    def sliced(self, func: Any, args: Sequence[Any]) -> "Region":
        """The region of a view of this one that `func` creates."""
        if self.entries is None:
            return self
        if func in (aten.detach.default, aten.alias.default):
            return self
        if func is aten.view.default:
            return Region(self.base, self.entries, reshaped=True)
        if self.reshaped or func not in (aten.select.int, aten.slice.Tensor):
            return Region(self.base, None)
        dims = [dim for dim, kept in enumerate(self.entries) if isinstance(kept, range)]
        dim = dims[args[1] if len(args) > 1 else 0]
        kept = self.entries[dim]
        assert isinstance(kept, range)
        new = kept[args[2]] if func is aten.select.int else kept[slice(*args[2:])]
        return Region(self.base, (*self.entries[:dim], new, *self.entries[dim + 1 :]))

    def own_part(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The elements of the rectangle that this rank owns: their index in the local tensor of `base`, and in the
        rectangle, each as one broadcastable index tensor per dim."""
        assert self.entries is not None
        box = own_box(self.base)
        here, there = [], []
        for dim, kept in enumerate(self.entries):
            found = [(position - box.start[dim], place) for place, position in enumerate(_positions(kept))]
            pairs = [(at, place) for at, place in found if 0 <= at < box.shape[dim]]
            shape = [-1 if other == dim else 1 for other in range(len(self.entries))]
            here.append(_index([at for at, _ in pairs]).view(shape))
            there.append(_index([place for _, place in pairs]).view(shape))
        return tuple(here), tuple(there)

    def copied(self) -> DTensor:
        """A new copy, with the shape and strides that the view would have. Collective: an all-reduce of the slice over
        each mesh axis that shards the tensor."""
        assert self.entries is not None
        base, local = self.base, local_tensor(self.base)
        rectangle = local.new_zeros([len(_positions(kept)) for kept in self.entries])
        here, there = self.own_part()
        if all(index.numel() for index in here):
            rectangle[there] = local[here]
        kept_dims = [(dim, kept) for dim, kept in enumerate(self.entries) if isinstance(kept, range)]
        shape = torch.Size(len(kept) for _, kept in kept_dims)
        copy = DTensor.from_local(
            rectangle.view(shape),
            base.device_mesh,
            [placement if placement.is_replicate() else Partial() for placement in base.placements],
            run_check=False,
            shape=shape,
            stride=tuple(base.stride(dim) * kept.step for dim, kept in kept_dims),
        )
        return copy.redistribute(base.device_mesh, [Replicate()] * base.device_mesh.ndim)


class Slices:
    """The copies that one `seeded` context has created or seen, for as long as they live."""

    def __init__(self) -> None:
        self._regions: dict[int, tuple[weakref.ref[DTensor], Region]] = {}

    def take(self, func: Any, args: Sequence[Any]) -> Any:
        """Run one of `SLICING` along a sharded dim. Returns copies that can be written to. Collective."""
        source = args[0]
        whole = Region(source, tuple(range(size) for size in source.shape))
        if func in (aten.select.int, aten.slice.Tensor):
            return self._copy(whole.sliced(func, args))
        size = source.shape[args[2] if len(args) > 2 else 0]
        num_pieces = max(-(-size // args[1]), 1) if func is aten.split.Tensor else len(args[1])
        return [self._copy(whole.sliced(*_one_of(func, args, index))) for index in range(num_pieces)]

    def note(self, func: Any, args: Sequence[Any], result: object) -> None:
        """After any other view operation: record which of its results are copies, or views of copies."""
        source = args[0]
        region = self._of(source)
        results = result if isinstance(result, list | tuple) else [result]
        for index, view in enumerate(results):
            if not isinstance(view, DTensor) or view is source:
                continue
            gathered = any(
                _is_cut(source, axis) and view.placements[axis].is_replicate() for axis in range(len(source.placements))
            )
            if region is None and not gathered:
                continue
            found = region or Region(source, tuple(range(size) for size in source.shape))
            self._regions[id(view)] = (weakref.ref(view), found.sliced(*_one_of(func, args, index)))

    def wrote(self, tensor: object) -> None:
        """After a write into `tensor`: if it is a copy, every rank writes the values that it owns back to the original.

        Raises:
            UnsupportedError: it is a copy of something else than a rectangle.
        """
        region = self._of(tensor)
        if region is None:
            return
        assert isinstance(tensor, DTensor)
        base = region.base
        if region.entries is None:
            raise UnsupportedError(
                f"a write into a view of a DTensor of shape {tuple(base.shape)} with placements {base.placements}: the "
                "view had to be gathered, and only slices (an index or start:stop:step for each dim) and view() are "
                "written back. Make the whole value as a plain tensor and copy_ it into the parameter."
            )
        local = local_tensor(base)
        here, there = region.own_part()
        # Collective if the copy itself is sharded, so it must come before the part that only some ranks run.
        values = whole_of(tensor).reshape([len(_positions(kept)) for kept in region.entries])
        if all(index.numel() for index in here):
            local[here] = values[there].to(local)

    def _copy(self, region: Region) -> DTensor:
        copy = region.copied()
        self._regions[id(copy)] = (weakref.ref(copy), region)
        return copy

    def _of(self, tensor: object) -> Region | None:
        known = self._regions.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return None
        return known[1]


def viewed(tensor: DTensor, shape: Sequence[int]) -> DTensor:
    """``tensor.view(shape)``. Gathers if DTensor raises, as for an unevenly sharded dim, or if a rank would have
    several pieces of a dim (rows and columns merged, sharded along the columns). Collective."""
    try:
        view: DTensor = aten.view.default(tensor, shape)
        own_box(view)
    except (RuntimeError, ArgumentError):  # depends only on the placements, so it happens on all ranks
        mesh = tensor.device_mesh
        whole = whole_of(tensor).reshape(shape)  # torch 2.11 gathers into other strides
        view = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return view


def cuts_sliced_dim(func: Any, args: Sequence[Any]) -> bool:
    """Whether a DTensor is sharded along the dim that the operation (one of `SLICING`) works on."""
    source = args[0]
    place = 2 if func in (aten.split.Tensor, aten.split_with_sizes.default) else 1
    dim = (args[place] if len(args) > place else 0) % source.ndim
    return any(
        _is_cut(source, axis) and getattr(placement, "dim", None) == dim
        for axis, placement in enumerate(source.placements)
    )


def _one_of(func: Any, args: Sequence[Any], index: int) -> tuple[Any, Sequence[Any]]:
    """The slicing that gives only result `index` of a view operation that may have several results."""
    if func not in (aten.split.Tensor, aten.split_with_sizes.default):
        return func, args
    dim = args[2] if len(args) > 2 else 0
    sizes = args[1] if func is aten.split_with_sizes.default else [args[1]] * (index + 1)
    start = sum(sizes[:index])
    return aten.slice.Tensor, (args[0], dim, start, start + sizes[index])


def _positions(kept: range | int) -> Sequence[int]:
    return kept if isinstance(kept, range) else [kept]


def _index(entries: Sequence[int]) -> torch.Tensor:
    """An index tensor on the CPU, even if the default device is another, such as meta while a model is built."""
    return torch.tensor(entries, dtype=torch.int64, device="cpu")


def _is_cut(tensor: DTensor, axis: int) -> bool:
    placement = tensor.placements[axis]
    return not placement.is_replicate() and not placement.is_partial()
