"""The content of a folder in any format: tensors by name, and for any part of a tensor the bytes that hold it.
Layer: checkpoint.

The reader of each format returns a `Catalog`: `native.py`, `huggingface.py`, `dcp.py`. Everything that reads (load,
load_from_rank, verify, describe, convert) works on catalogs, and gets values through `Catalog.read`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fsdp2.checkpoint.io.pieces import StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.io.reading import THREADS, OpenFiles, Request, read_all
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.placement.box import Box, Cover

__all__ = ["Catalog", "Part"]


class Part(NamedTuple):
    """A part of a stored tensor, and where it goes.

    Attributes:
        out: a tensor of the shape of `box`, to be filled.
        what: used in messages instead of the name.
    """

    section: str
    name: str
    box: Box
    out: torch.Tensor
    what: str = ""


@dataclass
class Catalog:
    """The content of a folder.

    Attributes:
        path: the folder, in the storage.
        kind: the format, as text.
        step: number of steps done; None if unknown.
        tensors: section ("model", "optimizer") -> name -> dtype and shape.
        aliases: section -> another name of a tensor -> the name that is in `tensors`.
        left_out: section ("" for none) -> content that this library cannot read -> why.
        places: name -> where a tensor of the model is, for formats with whole tensors.
        values: section -> values other than tensors, from each kind of rank (see `optimizer.py`, `model.py`).
        extra: the extra state, see `manifest.py`; other formats have none.
    """

    storage: Storage
    path: str
    kind: str
    step: int | None = None
    tensors: dict[str, dict[str, StoredTensorInfo]] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    places: dict[str, StoredPiece] = field(default_factory=dict)
    values: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    extra: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    world: int = 0

    @cached_property
    def opened(self) -> OpenFiles:
        """Its files, kept open: header and values come from the same file, even if that is deleted in between."""
        return OpenFiles(self.storage)

    @property
    def files(self) -> Iterable[str]:
        """The paths of the files to compare to find out whether two folders have the same content."""
        return {piece.path for piece in self.places.values()}

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """The pieces that meet a part of a tensor. Opens only files that contain such pieces.

        Raises:
            CorruptError: a file is damaged, or does not match the description of the folder.
        """
        return [self.places[name]]

    def extra_piece(self, file: str, name: str) -> StoredPiece:
        """A tensor of the extra state."""
        raise NotImplementedError

    def covering(self, section: str, name: str, box: Box) -> list[StoredPiece]:
        """The pieces that hold a part of a tensor.

        Raises:
            CorruptError: as for `pieces`; or the pieces leave a gap, or overlap.
        """
        found = [*self.pieces(section, name, box)]
        if len(found) == 1 and found[0].box == box:  # by far the most common case
            return found
        cover = Cover(box)
        met = [(piece, common) for piece in found if (common := piece.box.intersect(box)) is not None]
        for _, common in met:
            cover.add(common)
        cover.check(f"{self.path}: {section} '{name}'")
        return [piece for piece, _ in met]

    def read(self, parts: Iterable[Part], verify: bool = True, num_threads: int = THREADS) -> None:
        """Fill all parts, after checking that the files hold all of them; see `covering` and `read_all`."""
        requests = [
            Request(part.what or part.name, part.out, part.box, piece)
            for part in parts
            for piece in self.covering(part.section, part.name, part.box)
        ]
        read_all(self.opened, requests, verify, num_threads)

    def left_out_texts(self) -> dict[str, str]:
        """Everything that is left out, as text for messages ("model 'w'") -> why."""
        every = [(section, name, why) for section, names in self.left_out.items() for name, why in names.items()]
        return {f"{section} '{name}'".lstrip(): why for section, name, why in every}

    def close(self) -> None:
        """Release open files."""
        self.opened.close()
