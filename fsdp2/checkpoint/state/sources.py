"""Sources of a tensor's values that a checkpoint stores under another name or in another layout. Layer: checkpoint.

A source is an expression over stored tensors. It is never computed as a whole: for a box of the result, it returns
which boxes of which stored tensors go where. So a rank reads only what its shard needs, directly into place.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.errors import ArgumentError, MismatchError
from fsdp2.placement.box import Box

__all__ = ["Source", "Sources", "concatenated", "source_of", "stacked", "stored"]

MOST_SHOWN = 8  # sources listed in an error: a model may have hundreds of experts


# The stored tensors, by name.
Infos = Mapping[str, StoredTensorInfo]

# A part of a stored tensor and where it goes: (name, a view of the destination, which part).
Wanted = tuple[str, torch.Tensor, Box]


class Source(ABC):
    """The values of a tensor as an expression over stored tensors. Made by `stored`, `concatenated` and `stacked`; the
    methods return new sources, as the same operations on tensors return new tensors."""

    @abstractmethod
    def names(self) -> set[str]:
        """The stored tensors that it uses."""

    @abstractmethod
    def info(self, tensors: Infos) -> StoredTensorInfo:
        """Its dtype and shape.

        Args:
            tensors: all that are stored; the names of the source are among them.

        Raises:
            MismatchError: the stored shapes do not fit the expression.
        """

    @abstractmethod
    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        """What to read for a part of the result, and where to put it.

        Args:
            target: the tensor to fill, of the shape of `box`.
            box: the part of the result.
        """

    @abstractmethod
    def under(self, names: Mapping[str, str]) -> "Source":
        """The same source with renamed stored tensors.

        Args:
            names: name -> new name; others stay.
        """

    @property
    def T(self) -> "Source":
        """The transpose of a 2-D tensor: for checkpoints that store linear layers as ``(in, out)``."""
        return _Transposed((self,), (0, 1), 2)

    def transpose(self, dim0: int, dim1: int) -> "Source":
        """Two dims exchanged (negative: from the last one)."""
        return _Transposed((self,), (dim0, dim1))

    def narrow(self, dim: int, start: int, length: int) -> "Source":
        """A part along a dim (negative: from the last one): for checkpoints that fuse tensors that the model keeps
        separate."""
        return _Narrowed((self,), dim, start, length)


def stored(name: str) -> Source:
    """The tensor stored under a name.

    Example::

        sources = {"up.weight": stored("h.0.mlp.c_fc.weight").T}
        fsdp2.checkpoint.load(folder, model=model, sources=sources)
    """
    return _Stored(name)


def concatenated(*parts: Source | str, dim: int = 0) -> Source:
    """Several sources concatenated along a dim (negative: from the last one): for models that fuse tensors that the
    checkpoint keeps separate.

    Raises:
        ArgumentError: no source is given, or one is neither a source nor a name.

    Example::

        sources = {"qkv.weight": concatenated("q_proj.weight", "k_proj.weight", "v_proj.weight")}
    """
    if not parts:
        raise ArgumentError("concatenated: expected at least one source")
    return _Concatenated(tuple(_as_source(part, "concatenated") for part in parts), dim)


def stacked(*parts: Source | str, dim: int = 0) -> Source:
    """Several sources of one shape stacked along a new dim (negative: from the last one): for models that keep all
    experts in one tensor. A rank reads only those of which its shard contains a part.

    Raises:
        ArgumentError: no source is given, or one is neither a source nor a name.

    Example::

        sources = {"experts.down": stacked(*(f"experts.{number}.down.weight" for number in range(8)))}
    """
    if not parts:
        raise ArgumentError("stacked: expected at least one source")
    return _Stacked(tuple(_as_source(part, "stacked") for part in parts), dim)


# For names of the model: another name, an expression, or (None) the same name.
Sources = Mapping[str, Source | str] | Callable[[str], Source | str | None]


def source_of(name: str, sources: Sources | None) -> Source | None:
    """The source of a tensor of the model; None if it is stored under its own name, or `sources` does not mention it.

    Raises:
        ArgumentError: the value in `sources` is not a source.
    """
    found = None if sources is None else sources(name) if callable(sources) else sources.get(name)
    return None if found is None else _as_source(found, f"sources: '{name}'")


def _as_source(what: object, where: str) -> Source:
    if isinstance(what, str):
        return stored(what)
    if isinstance(what, Source):
        return what
    raise ArgumentError(
        f"{where}: expected the name of a stored tensor, or what `stored`, `concatenated` or `stacked` make of it, got "
        f"a {type(what).__qualname__}"
    )


@dataclass(frozen=True)
class _Stored(Source):
    name: str

    def names(self) -> set[str]:
        return {self.name}

    def under(self, names: Mapping[str, str]) -> Source:
        return _Stored(names.get(self.name, self.name))

    def info(self, tensors: Infos) -> StoredTensorInfo:
        return tensors[self.name]

    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        if box.numel:
            yield self.name, target, box


@dataclass(frozen=True)
class _Made(Source):
    """A source made of others."""

    parts: tuple[Source, ...]

    def names(self) -> set[str]:
        return {name for part in self.parts for name in part.names()}

    def under(self, names: Mapping[str, str]) -> Source:
        return replace(self, parts=tuple(part.under(names) for part in self.parts))

    def _unfit(self, how: str, infos: Sequence[StoredTensorInfo]) -> MismatchError:
        shown = [
            f"{', '.join(map(repr, sorted(part.names())))} {info.dtype} {list(info.shape)}"
            for part, info in zip(self.parts, infos, strict=True)
        ]
        more = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
        return MismatchError(f"{how} does not fit what is stored: {', '.join(shown[:MOST_SHOWN])}{more}")


@dataclass(frozen=True)
class _Transposed(_Made):
    dims: tuple[int, int]
    ndim: int | None = None  # the required number of dims

    def info(self, tensors: Infos) -> StoredTensorInfo:
        info = self.parts[0].info(tensors)
        if any(_counted(dim, info.shape) is None for dim in self.dims) or self.ndim not in (None, len(info.shape)):
            raise self._unfit(f"transpose{self.dims}", [info])
        return StoredTensorInfo(info.dtype, self._exchanged(info.shape))

    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        inner = Box(self._exchanged(box.start), self._exchanged(box.shape))
        yield from self.parts[0].wanted(target.transpose(*self.dims), inner, tensors)

    def _exchanged(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        result = list(sizes)
        one, other = self.dims
        result[one], result[other] = result[other], result[one]
        return tuple(result)


@dataclass(frozen=True)
class _Narrowed(_Made):
    dim: int
    start: int
    length: int

    def info(self, tensors: Infos) -> StoredTensorInfo:
        info = self.parts[0].info(tensors)
        dim = _counted(self.dim, info.shape)
        if dim is None or not 0 <= self.start <= self.start + self.length <= info.shape[dim]:
            raise self._unfit(f"narrow({self.dim}, {self.start}, {self.length})", [info])
        return StoredTensorInfo(info.dtype, _with(info.shape, dim, self.length))

    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        dim = self.dim % len(box.shape)
        moved = Box(_with(box.start, dim, box.start[dim] + self.start), box.shape)
        yield from self.parts[0].wanted(target, moved, tensors)


@dataclass(frozen=True)
class _Concatenated(_Made):
    dim: int

    def info(self, tensors: Infos) -> StoredTensorInfo:
        infos = [part.info(tensors) for part in self.parts]
        dim = _counted(self.dim, infos[0].shape)
        if dim is None or len({(info.dtype, len(info.shape), *_without(info.shape, dim)) for info in infos}) != 1:
            raise self._unfit(f"concatenated along dim {self.dim}", infos)
        return StoredTensorInfo(infos[0].dtype, _with(infos[0].shape, dim, sum(info.shape[dim] for info in infos)))

    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        dim = self.dim % len(box.shape)
        sizes = [part.info(tensors).shape[dim] for part in self.parts]
        low, high = box.start[dim], box.end[dim]
        for part, size, end in zip(self.parts, sizes, accumulate(sizes), strict=True):
            first, last = max(low, end - size), min(high, end)
            if first < last:
                own = Box(_with(box.start, dim, first - (end - size)), _with(box.shape, dim, last - first))
                yield from part.wanted(target.narrow(dim, first - low, last - first), own, tensors)


@dataclass(frozen=True)
class _Stacked(_Made):
    dim: int

    def info(self, tensors: Infos) -> StoredTensorInfo:
        infos = [part.info(tensors) for part in self.parts]
        shape = infos[0].shape
        dim = _counted(self.dim, (len(infos), *shape))
        if dim is None or any(info != infos[0] for info in infos):
            raise self._unfit(f"stacked along dim {self.dim}", infos)
        return StoredTensorInfo(infos[0].dtype, (*shape[:dim], len(infos), *shape[dim:]))

    def wanted(self, target: torch.Tensor, box: Box, tensors: Infos) -> Iterator[Wanted]:
        dim = self.dim % len(box.shape)
        inner = Box(_without(box.start, dim), _without(box.shape, dim))
        for place in range(box.shape[dim]):
            yield from self.parts[box.start[dim] + place].wanted(target.select(dim, place), inner, tensors)


def _counted(dim: int, shape: tuple[int, ...]) -> int | None:
    """A dim, counted from the first; None if it does not exist."""
    return dim % len(shape) if -len(shape) <= dim < len(shape) else None


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
