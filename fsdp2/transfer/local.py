"""`Local`: what this rank holds of the tensors of a plan. Layer: transfer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fsdp2.transfer.items import Item

if TYPE_CHECKING:
    from fsdp2.checkpoint.ranks.world import Entry

Deltas = Callable[[str, torch.dtype], list[torch.Tensor]]


class Local:
    """What this rank holds of each piece of each item: views of shards, unless they are cast or merged.

    Args:
        cast: cast to the dtype in which the item is sent.
        deltas: whole tensors to add to a tensor of the model.

    Attributes:
        device: where the tensors are.
    """

    def __init__(self, items: Sequence[Item], entries: "Mapping[str, Entry]", cast: bool, deltas: Deltas | None):
        self._items = items
        self._entries = entries
        self._cast = cast
        self._deltas = deltas
        self._last: tuple[str, list[torch.Tensor]] = "", []  # deltas of the last tensor, for its other pieces
        devices = (entries[piece.key].local.device for item in items for piece in item.pieces)
        self.device = next((each for each in devices if each.type != "meta"), torch.device("cpu"))

    @torch.no_grad()
    def __call__(self, index: int, number: int, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """The values of one piece, or of a part of it."""
        item = self._items[index]
        piece = item.pieces[number]
        entry = self._entries[piece.key]
        found = piece.local(entry.local, entry.box)[part]
        if self._deltas is not None:
            if self._last[0] != piece.key:
                self._last = piece.key, self._deltas(piece.key, entry.local.dtype)
            found = found.clone() if self._last[1] else found
            for whole in self._last[1]:
                found += piece.local(whole[entry.box.slices()], entry.box)[part].to(found.device)
        return found.to(item.meta.dtype) if self._cast else found

    def all(self) -> Iterator[torch.Tensor]:
        """The values of all pieces, in order."""
        for index, item in enumerate(self._items):
            for number in range(len(item.pieces)):
                yield self(index, number)
