"""What a folder holds, in any format: tensors by name, and for any part of a tensor the bytes that hold it.
Layer: checkpoint.

The reader of each format returns a `Catalog`: `native.py`, `huggingface.py`, `dcp.py`. Everything that reads (load,
verify, describe, convert) works on catalogs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CorruptError
from fsdp2.placement.box import Box, boxes_of_flat_range, flat_range

__all__ = ["Catalog", "LeftOut", "PieceTable", "StoredPiece", "StoredTensorInfo", "left_out_of", "runs_within"]


class StoredTensorInfo(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: its name in safetensors.
        shape: of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class StoredPiece:
    """A part of a tensor, somewhere in a file, row-major.

    Attributes:
        path: of the file, in the storage.
        offset: where the container begins in the file.
        container: the part of the whole tensor that is stored at `offset` without gaps.
        box: the part of the container that this piece stands for (all of it, except in consolidated files).
        dtype: its name in safetensors.
        sums: checksums of the blocks of the row-major bytes of `box`, joined; "" if there are none.
    """

    path: str
    offset: int
    container: Box
    box: Box
    dtype: str
    sums: str = ""


def runs_within(box: Box, container: Box, itemsize: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(byte of the container, bytes) of the runs that bytes ``start..end`` of a box's values are, in order."""
    within = box.within(container)
    place = flat_range(within, container.shape)
    if place is not None:
        yield place[0] * itemsize + start, end - start
        return
    for part in boxes_of_flat_range(box.shape, start // itemsize, end // itemsize):
        moved = Box(tuple(a + b for a, b in zip(part.start, within.start, strict=True)), part.shape)
        yield from ((low * itemsize, (high - low) * itemsize) for low, high in moved.runs(container.shape))


# Section ("" for none) -> what the folder has there, and this library cannot read -> why.
LeftOut = Mapping[str, Mapping[str, str]]


class Catalog(Protocol):
    """The content of a folder."""

    @property
    def storage(self) -> Storage:
        """Where it is."""

    @property
    def path(self) -> str:
        """The folder, in the storage."""

    @property
    def kind(self) -> str:
        """The format, as text."""

    @property
    def step(self) -> int | None:
        """Number of steps done; None if unknown."""

    @property
    def tensors(self) -> Mapping[str, Mapping[str, StoredTensorInfo]]:
        """Section ("model", "optimizer") -> name -> dtype and shape."""

    @property
    def aliases(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> another name of a tensor -> the name that is in `tensors`."""

    @property
    def values(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Section -> values other than tensors, from each kind of rank (see `optimizer.py`, `state.py`)."""

    @property
    def files(self) -> Iterable[str]:
        """The paths of the files that show whether two folders hold the same."""

    @property
    def left_out(self) -> LeftOut:
        """What is neither in `tensors` nor in `values`. Of values it is known once `values` of the section was read."""

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """The pieces that meet a part of a tensor. Opens only files that contain such pieces.

        Raises:
            CorruptError: a file is damaged, or does not match the description of the folder.
        """

    def close(self) -> None:
        """Release open files."""


def left_out_of(catalog: Catalog) -> dict[str, str]:
    """All that a catalog leaves out, as texts for people ("model 'w'") -> why."""
    every = [(section, name, why) for section, names in catalog.left_out.items() for name, why in names.items()]
    return {f"{section} '{name}'".lstrip(): why for section, name, why in every}


@dataclass
class PieceTable:
    """A catalog whose pieces are all known from the start, for formats that list them.

    Attributes:
        table: section -> name -> pieces.
    """

    storage: Storage
    path: str
    kind: str
    step: int | None = None
    tensors: dict[str, dict[str, StoredTensorInfo]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    table: dict[str, dict[str, list[StoredPiece]]] = field(default_factory=dict)

    def add(self, section: str, name: str, info: StoredTensorInfo, pieces: Iterable[StoredPiece]) -> None:
        """Add a tensor, or more pieces of one; `CorruptError` for an invalid name."""
        if type(name) is not str:
            raise CorruptError(f"{self.path}: a tensor is called {str(name)[:80]}, a {type(name).__name__}; not a text")
        self.tensors.setdefault(section, {}).setdefault(name, info)
        self.table.setdefault(section, {}).setdefault(name, []).extend(pieces)

    @property
    def files(self) -> Iterable[str]:
        """See `Catalog`."""
        return {piece.path for tensors in self.table.values() for pieces in tensors.values() for piece in pieces}

    def leave_out(self, section: str, name: object, why: str) -> None:
        """Note what cannot be read."""
        self.left_out.setdefault(section, {})[str(name)] = why

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        return [piece for piece in self.table[section][name] if piece.box.intersect(wanted) is not None]

    def close(self) -> None:
        """See `Catalog`."""
