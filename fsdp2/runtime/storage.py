"""`FlatStorage`: one piece of memory for all tensors of a kind, given back and taken again as a whole. Layer: runtime.

Views are made once; they survive `free` and `alloc`, because those resize the storage that the views share, and so do
tensors that autograd saved. Each view has a version counter of its own: filling the memory through one does not tell
autograd that the parameter on the same bytes was modified, which is right, since it is filled with the same values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from fsdp2.layout import strides

__all__ = ["ALIGN_BYTES", "FlatStorage", "Storage", "Storages"]

ALIGN_BYTES = 256  # what CUDA's allocator aligns to, hence what vectorised kernels may expect


class Storage(Protocol):
    """Memory that is taken and given back as a whole."""

    def alloc(self) -> None:
        """Take the memory; its content is undefined."""

    def free(self) -> None:
        """Give the memory back."""


class Storages:
    """Several as one."""

    def __init__(self, parts: Sequence[Storage]):
        self.parts = parts

    def alloc(self) -> None:
        """See `Storage.alloc`."""
        for part in self.parts:
            part.alloc()

    def free(self) -> None:
        """See `Storage.free`."""
        for part in self.parts:
            part.free()


class FlatStorage:
    """`nbytes` of memory on `device`, allocated on the stream that is current at `alloc`."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self._device = device
        self._storage = torch.UntypedStorage(0, device=device)

    def alloc(self) -> None:
        """Take the memory; its content is undefined. On a stream: the one that frees it must be the same."""
        if self._storage.size() != self.nbytes:
            self._storage.resize_(self.nbytes)

    @property
    def is_taken(self) -> bool:
        """Whether it has its memory now."""
        return self._storage.size() == self.nbytes

    def free(self) -> None:
        """Give the memory back; views keep their shapes and must not be read."""
        self._storage.resize_(0)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the bytes from `offset_bytes`, which `dtype` must divide. Only between `alloc` and
        `free`: torch would grow a freed storage."""
        assert self._storage.size() == self.nbytes
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(self._storage, offset_bytes // dtype.itemsize, tuple(shape), strides(shape))
