"""Read any part of a stored tensor, in bounded memory, from any thread. Layer: checkpoint.

Shared by verify and convert: they process checkpoints that are larger than the machine's memory, in chunks, with
several threads, and report their progress.
"""

from collections.abc import Callable, Iterator
from threading import Lock

import torch

from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.placement.box import Box, boxes_of_flat_range

__all__ = ["CHUNK_BYTES", "Fill", "Meter", "Progress", "stored_blocks"]

CHUNK_BYTES = 4 * BLOCK  # bytes of a tensor that a thread holds in memory

# Called with the number of bytes done and the total, one call at a time.
Progress = Callable[[int, int], None]


class Meter:
    """Adds up what threads have done, for a progress bar.

    Args:
        total: the total number of bytes.
        progress: the callback; None for none.
    """

    def __init__(self, total: int, progress: Progress | None):
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = Lock()

    def add(self, nbytes: int) -> None:
        """Add to the number of bytes done."""
        if self._progress is None:
            return
        with self._lock:
            self._done += nbytes
            self._progress(min(self._done, self._total), self._total)

    def finish(self) -> None:
        """Report that everything is done."""
        self.add(self._total)


# Given a view to fill, and which part of a tensor that is: fills it.
Fill = Callable[[torch.Tensor, Box], None]


def stored_blocks(fill: Fill, box: Box, dtype: str, first: int, last: int) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a part of a stored tensor, row by row, in blocks, like `blocks_of` for tensors in
    memory. Any number of threads may call this.

    Args:
        box: the part of the tensor.
        dtype: the dtype to convert the values to, by its name in safetensors.

    Raises:
        CorruptError: they are damaged or incomplete.
    """
    itemsize = ITEMSIZES[dtype]
    for start in range(first, last, CHUNK_BYTES):
        data = bytearray(min(CHUNK_BYTES, last - start))
        flat, filled = torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]), 0
        for part in boxes_of_flat_range(box.shape, start // itemsize, (start + len(data)) // itemsize):
            place = Box(tuple(a + b for a, b in zip(part.start, box.start, strict=True)), part.shape)
            fill(flat[filled : filled + part.numel].view(part.shape), place)
            filled += part.numel
        for at in range(0, len(data), BLOCK):
            # A caller that batches writes after each chunk.
            yield memoryview(data)[at : at + BLOCK], at + BLOCK < len(data)
