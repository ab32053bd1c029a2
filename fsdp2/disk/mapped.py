"""Tensors on memory-mapped files: the system reads pages that are accessed, and writes those that have changed. Layer:
above `placement.carving`, whose carved tensors may be in a file.

Every operation works on them, and sees the values of the last write. `ShardFiles` hints when memory is not needed
for a while, and which files are used next; a wrong hint only costs another read.
"""

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import base_of
from fsdp2.disk.file import DiskFile, in_turn, remove_leftovers
from fsdp2.placement.carving import place_of

_made = count()


class MappedFile(DiskFile):
    """A file without a name that is mapped as memory, zeros at first.

    Attributes:
        memory: the storage.
        failure: why it could not be written, until `ShardFiles.check` has raised it. The system may have lost the
            values, and reports that only once, to the writer.
    """

    def __init__(self, folder: str, nbytes: int, what: str, so: str):
        super().__init__(folder, nbytes, what, so)
        self.failure: OSError | None = None
        self.memory: Any = torch.UntypedStorage.from_file(f"/dev/fd/{self._fd}", True, nbytes)

    def read_ahead(self) -> None:
        """Start to read all of it."""
        if sys.platform == "linux":
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def evict(self) -> None:
        """Write what has changed, and free the memory until it is used again."""
        if sys.platform != "linux":
            return
        # The page cache only drops pages that are not mapped and have been written.
        address, size = ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_size_t(self.memory.nbytes())
        _libc().madvise(address, size, mmap.MADV_DONTNEED)
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            message = f"Offload: sharded parameters could not be written ({error.strerror}). Load the last checkpoint"
            self.failure = OSError(error.errno, message)
            return
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# Maps tensors from `zeros` to their files. As the base of views, a tensor lives as long as its memory is used.
_files = WeakIdKeyDictionary()


def zeros(numel: int, dtype: torch.dtype, folders: Sequence[str]) -> torch.Tensor:
    """A 1-D tensor of zeros in a new file. The folders are used in turn.

    Raises:
        OSError: the folder cannot be written to, or has no room.
    """
    if not numel:
        return torch.zeros(0, dtype=dtype)
    folder = in_turn(folders, next(_made))
    remove_leftovers(folder)
    so = "Make room, or choose another folder in Offload(tier=...)"
    file = MappedFile(folder, numel * dtype.itemsize, "sharded parameters", so)
    tensor = _on(file.memory, dtype)
    _files[tensor] = file
    return tensor


def _on(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is not a view, so that it is the base of tensors carved from it."""
    tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(memory)
    return tensor


def file_of(tensor: torch.Tensor) -> MappedFile | None:
    """The file that has the elements of a tensor from `zeros`, or of a view of one."""
    base = base_of(tensor)
    whole = tensor if base is None else base
    place = place_of(whole)
    file: MappedFile | None = _files.get(whole if place is None else place[0])
    return file


class ShardFiles:
    """Files that are used together.

    Example::

        shards = ShardFiles(files)
        shards.check()
        ...  # read them
        shards.used()
    """

    def __init__(self, files: Iterable[MappedFile]):
        self._files = list({id(file): file for file in files}.values())
        self._next: WeakKeyDictionary[ShardFiles, ref[ShardFiles]] = WeakKeyDictionary()

    def check(self) -> None:
        """Call it before the files are used.

        Raises:
            OSError: a file could not be written since the last call.
        """
        for file in self._files:
            failure, file.failure = file.failure, None
            if failure is not None:
                raise failure

    def used(self) -> None:
        """Release them, and read ahead the files that followed them last time. What follows depends on the files used
        before, because forward and backward use units in different orders."""
        recent = [each for known in _recent if (each := known()) is not None]
        if len(recent) == 2:
            recent[0]._next[recent[1]] = ref(self)
        follower = self._next.get(recent[0]) if recent else None
        _recent.appendleft(ref(self))
        _thread().submit(self.evict)
        if follower is not None and (shards := follower()) is not None and shards is not self:
            _thread().submit(shards.read_ahead)

    def read_ahead(self) -> None:
        """Start to read them."""
        for file in self._files:
            file.read_ahead()

    def evict(self) -> None:
        """Write what has changed, and free the memory."""
        for file in self._files:
            file.evict()


_recent: "deque[ref[ShardFiles]]" = deque(maxlen=2)  # the last two that were used


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fsdp2-mapped")
