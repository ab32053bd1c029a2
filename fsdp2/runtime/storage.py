"""`FlatStorage`: one block of memory for several tensors, freed and allocated as a whole; `ReleasedMemory`: blocks that
compute may still read. Layer: runtime.

Views are created once. They, and tensors that autograd saved, survive `free` and `alloc`, which resize the storage that
the views share. Each view has its own version counter, so autograd does not see filling the memory through one view as
a modification of the parameter on the same bytes. That is correct, because it is filled with the same values.
"""

from collections import deque
from collections.abc import Sequence

import torch

from fsdp2.layout import strides
from fsdp2.runtime.streams import Streams

ALIGN_BYTES = 256  # the alignment of CUDA's allocator, which vectorised kernels may expect


class FlatStorage:
    """`nbytes` of memory on `device`, allocated on the stream that is current at `alloc`; `is_taken` while it is."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self._device = device
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.is_taken = False

    def alloc(self) -> None:
        """Allocate the memory; its content is undefined. It must be freed on the same stream."""
        if not self.is_taken:
            self.is_taken = True
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Free the memory; views keep their shapes but must not be read."""
        if self.is_taken:
            self.is_taken = False
            self._storage.resize_(0)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the bytes from `offset_bytes`, which `dtype` must divide. Only between `alloc` and
        `free`: torch would grow a freed storage."""
        assert self.is_taken
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(self._storage, offset_bytes // dtype.itemsize, tuple(shape), strides(shape))


class ReleasedMemory:
    """Owns storage from a reshard until the all-gather stream may free it: after that stream has waited for the event
    of compute's last use."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self.released: deque[tuple[FlatStorage, torch.Event | None, str]] = deque()

    def make_room(self, storage: FlatStorage | None, prefetching: bool) -> None:
        """Called on the all-gather stream before `storage` (None: not created yet) is allocated: free released storage
        until at most two units are in memory. If `storage` itself is released, take it back. A unit that unshards for
        itself leaves one released unit, which may still compute; a prefetch leaves none, as its caller computes."""
        for entry in [entry for entry in self.released if entry[0] is storage]:
            self.released.remove(entry)
            self.streams.wait(entry[1])
        while self.released and (prefetching or self.released[0][2] != self.released[-1][2]):
            self._free_oldest()

    def release(self, storage: FlatStorage, unit: str = "") -> None:
        """Take ownership of `storage`. The compute stream's last use of it, by this unit, has been enqueued."""
        if self.streams.lazy:
            storage.free()
        else:
            self.released.append((storage, self.streams.record(), unit))

    def free_all(self) -> None:
        """Free all released storage, once compute has finished with it."""
        with self.streams.gathering():
            while self.released:
                self._free_oldest()

    def _free_oldest(self) -> None:
        storage, event, _ = self.released.popleft()
        if event is not None:
            self.streams.wait(event)
        storage.free()
