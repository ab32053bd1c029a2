"""The positions of a tensor's elements in a packed buffer. Layer: runtime."""

from collections.abc import Sequence

import torch

from fsdp2._torch import chunk_cat, foreach_copy
from fsdp2.layout import ShardLayout


def interleave(
    packed: torch.Tensor, offset: int, full: torch.Tensor, layout: ShardLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views of the same elements and shape: (in the packed buffer, in the whole tensor).

    Args:
        packed: ``[parts, segment numel]``; the chunk of rank r is in row r, from column `offset` on.
        full: the whole tensor, of ``layout.shape``.

    At most two pairs for any number of ranks: all full chunks, and the smaller last one.
    """
    if layout.numel == 0:
        return []
    dim, chunk = layout.dim, layout.chunk
    num_full = layout.shape[dim] // chunk
    pairs = []
    if num_full:
        columns = packed[:num_full, offset : offset + layout.padded_numel]
        chunks = full.narrow(dim, 0, num_full * chunk).unflatten(dim, (num_full, chunk)).movedim(dim, 0)
        pairs.append((columns.unflatten(1, layout.local_shape(0)), chunks))
    rest = layout.shape[dim] - num_full * chunk
    if rest:
        shape = layout.local_shape(num_full)
        row = packed[num_full, offset : offset + layout.local_numel(num_full)]
        pairs.append((row.view(shape), full.narrow(dim, num_full * chunk, rest)))
    return pairs


class Packing:
    """How whole tensors are packed into one buffer ``[parts, sum of padded shards]``; padding is zero. All `layouts`
    have the same number of parts.

    Attributes:
        segment: the elements of a part.
    """

    def __init__(self, layouts: Sequence[ShardLayout]):
        self.layouts = layouts
        self.num_tensors = len(layouts)
        self.segment = sum(layout.padded_numel for layout in layouts)
        self._are_rows = all(layout.dim == 0 and layout.numel for layout in layouts)

    def pack(self, tensors: list[torch.Tensor], buffer: torch.Tensor | None = None) -> torch.Tensor:
        """The buffer (None: a new one), in the dtype of `tensors`."""
        size, like = self.layouts[0].parts, tensors[0]
        if buffer is None:
            buffer = torch.empty(size, self.segment, dtype=like.dtype, device=like.device)
        if self._are_rows:
            chunk_cat(tensors, 0, size, out=buffer)
            return buffer
        buffer.zero_()
        offset = 0
        destinations, sources = [], []
        for layout, tensor in zip(self.layouts, tensors, strict=True):
            for destination, source in interleave(buffer, offset, tensor, layout):
                destinations.append(destination)
                sources.append(source)
            offset += layout.padded_numel
        foreach_copy(destinations, sources)
        return buffer
