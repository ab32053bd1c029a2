"""`DiskState`: optimizer state that is kept in a file. Layer: optim.

::

    prefetch    one thread admits the state of at most three units to memory, in step order; four threads read
    step        in the background, as without files
    store       the same four threads write; then the memory is freed, and the next unit's state is admitted

So while one unit is stepped, the next is read and the previous one is written. Parameters in files (see
`disk/mapped.py`) are read ahead and released at the same times. The files have no names, so the system frees them when
the process dies.

Source: ZeRO-Infinity, https://arxiv.org/abs/2104.07857.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import cache
from threading import BoundedSemaphore, RLock
from typing import Any, NamedTuple, Self
from weakref import WeakMethod, ref

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, spec_of
from fsdp2._torch.optim import is_view, no_torch_function, wrapper_like, written_arguments
from fsdp2._torch.shared import storage_key
from fsdp2.disk.direct import memory_at
from fsdp2.disk.file import DiskFile, remove_leftovers, whole_pages
from fsdp2.disk.mapped import ShardFiles
from fsdp2.extras.host_memory import HOST
from fsdp2.optim.flats import identical
from fsdp2.optim.staged import OffloadedState, State, storages_of
from fsdp2.runtime.tree import map_tensors

IN_MEMORY = 3  # units' states: one is read, one is stepped, one is written
CHUNK = 8 << 20  # bytes that a thread reads or writes in one task


class _Threads(NamedTuple):
    room: BoundedSemaphore
    gate: ThreadPoolExecutor  # waits for room
    io: ThreadPoolExecutor
    freeing: ThreadPoolExecutor  # waits for writes


@cache
def _threads() -> _Threads:
    pools = [ThreadPoolExecutor(number, f"fsdp2-disk-{name}") for name, number in (("gate", 1), ("io", 4), ("free", 1))]
    return _Threads(BoundedSemaphore(IN_MEMORY), *pools)


class DiskState(OffloadedState):
    """State that is kept in a file.

    Args:
        state, device: as for `OffloadedState`.
        folder: where the file is; created if it does not exist.
        param_files: files with parameters that the step needs too.
        settle: waits for the step; called before anything reads a shown tensor.
    """

    def __init__(
        self,
        state: MutableMapping[Any, State],
        device: torch.device,
        folder: str,
        param_files: ShardFiles,
        settle: Callable[[], None],
    ):
        super().__init__(state, device)
        self._settle = WeakMethod(settle)
        self._folder = folder
        self._param_files = param_files
        self._places: list[Place] = []
        self._reads: Future[None] | None = None
        self._begun: list[Future[None]] = []
        self._written: Future[None] | None = None
        remove_leftovers(folder)

    def prefetch(self) -> None:
        """Start to read."""
        self._begun = []
        self._reads = _threads().gate.submit(self._begin_to_read)

    def _begin_to_read(self) -> None:
        _threads().room.acquire()
        self._param_files.read_ahead()
        if self._written is not None:
            wait([self._written])
        for place in self._places:
            if place.memory is None:
                for read in place.begin_to_read(self.device):
                    self._begun.append(read)  # at once: the next read may fail, and `drop` must wait for this one

    def fetch(self) -> None:
        """Wait until all is in memory."""
        assert self._reads is not None
        self._reads.result()
        wait(self._begun)
        for read in self._begun:
            read.result()
        for place in self._places:
            place.move_there()

    def store(self) -> None:
        """Start to write.

        Raises:
            OSError: the last write has failed, and `finish` has not raised it.
        """
        values = self.all_values()
        before = self._written
        try:
            if not identical(values, self.values):
                self._place(values)
            writes = [write for place in self._places for write in place.begin_to_write()]
            self._written = _threads().freeing.submit(self._free_after, writes)
        except BaseException:
            _threads().room.release()
            raise
        if before is not None:
            before.result()

    def drop(self) -> None:
        """Discard the changes of the step: the file still has the previous values."""
        assert self._reads is not None
        wait([self._reads])
        wait(self._begun)
        for place in self._places:
            place.free()
        _threads().room.release()

    def _free_after(self, writes: "Sequence[Future[None]]") -> None:
        try:
            wait(writes)
            for write in writes:
                write.result()
            for place in self._places:
                place.free()
            self._param_files.evict()
        finally:
            _threads().room.release()

    def finish(self) -> None:
        """Wait until all is written."""
        written = self._written
        try:
            if written is not None:
                written.result()
        except BaseException:
            self._written = None  # raised only once; the next step writes again
            raise
        self._param_files.check()

    def settle(self) -> None:
        """Wait until the step is complete and everything is written."""
        settle = self._settle()
        if settle is not None:
            settle()
        self.finish()

    def _place(self, values: list[DTensor]) -> None:
        """Find places in a new file for these. If the disk has no room, nothing changes."""
        # Tensors without memory, or whose memory is shared with others, stay where they are.
        storages = {
            key: there
            for key, there in storages_of(values).items()
            if there.numel() and there.untyped_storage().resizable()
        }
        nbytes = sum(map(whole_pages, map(torch.Tensor.numel, storages.values())))
        so = "They stay in memory, and the step is complete: a checkpoint can be saved"
        file = DiskFile(self._folder, nbytes, "an optimizer's state", so)
        places, offset = {}, 0
        for key, there in storages.items():
            places[key] = Place(self, file, offset, there)
            offset += whole_pages(there.numel())
        for before in self._places:
            before.memory = None  # its file has the values of the last step
        self.values, self.shown, self._places = values, [], [*places.values()]
        for value in values:
            local = local_tensor(value)
            place = places.get(storage_key(local)[0])
            if place is not None:
                meta = torch.empty(local.untyped_storage().nbytes() // local.itemsize, dtype=local.dtype, device="meta")
                like = meta.as_strided(local.shape, local.stride(), local.storage_offset())
                value = make_dtensor(DiskTensor(like, place), spec_of(value))
            self.shown.append(value)


class Place:
    """Some bytes of a file, and of memory while they are used.

    Args:
        state: the state to which the bytes belong.
        offset: their offset in the file.
        there: the bytes of the tensors that the optimizer steps with.

    Attributes:
        memory: host memory with the bytes; `there` itself if that is on the host. None while only the file has them.
    """

    def __init__(self, state: DiskState, file: DiskFile, offset: int, there: torch.Tensor):
        self._state = ref(state)
        self._file = file
        self._offset = offset
        self._there = there
        self._nbytes = there.numel()
        self.memory: torch.Tensor | None = None
        self.changing = RLock()  # held from reading to writing back while a tensor is changed

    def begin_to_read(self, device: torch.device) -> "Iterator[Future[None]]":
        """Read all of it into memory. Reads start as the iterator is consumed."""
        if device == HOST:
            self._there.untyped_storage().resize_(self._nbytes)
            self.memory = self._there
        else:
            self.memory = torch.empty(self._nbytes, dtype=torch.uint8, device=HOST)
        yield from self._chunks(self._file.fill, self.memory)

    def move_there(self) -> None:
        """Copy from host memory to where the optimizer steps."""
        if self.memory is not self._there:
            assert self.memory is not None
            self._there.untyped_storage().resize_(self._nbytes)
            self._there.copy_(self.memory)

    def begin_to_write(self) -> "Iterator[Future[None]]":
        """Write all of it. Writes start as the iterator is consumed."""
        if self._there.device == HOST:
            self.memory = self._there
        else:
            self.memory = self._there.to(HOST)
            self._there.untyped_storage().resize_(0)
        yield from self._chunks(self._file.keep, self.memory)

    def _chunks(self, do: Callable[[int, memoryview], None], memory: torch.Tensor) -> "Iterator[Future[None]]":
        view = memory_at(memory.data_ptr(), self._nbytes)
        for start in range(0, self._nbytes, CHUNK):
            yield _threads().io.submit(do, self._offset + start, view[start : start + CHUNK])

    def free(self) -> None:
        """Free the memory, because the file has the values."""
        if self.memory is self._there:
            self._there.untyped_storage().resize_(0)
        self.memory = None

    def read(self, start: int, into: memoryview) -> None:
        """Read some bytes, after the step is complete."""
        self._wait()
        if self.memory is None:
            self._file.read(self._offset + start, into)
        else:
            into[:] = memory_at(self.memory.data_ptr() + start, into.nbytes)

    def write(self, start: int, values: memoryview) -> None:
        """Write some bytes, after the step is complete."""
        self._wait()
        if self.memory is None:
            self._file.write(self._offset + start, values)
        else:
            memory_at(self.memory.data_ptr() + start, values.nbytes)[:] = values

    def _wait(self) -> None:
        state = self._state()
        if state is not None:
            state.settle()


class DiskTensor(torch.Tensor):
    """A tensor whose values are in a file. An operation reads what it needs, and writes what it has changed. A view
    reads nothing, and is a tensor in the file too.

    Args:
        like: a meta tensor with its shape, strides and offset in the elements of `place`.
    """

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, like: torch.Tensor, place: Place) -> Self:
        tensor: Self = wrapper_like(cls, like, HOST)
        return tensor

    def __init__(self, like: torch.Tensor, place: Place):
        self.like = like
        self.place = place

    def in_memory(self) -> torch.Tensor:
        """A copy in memory."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride(), strict=True))
        buffer = torch.empty(last + 1 if self.numel() else 0, dtype=self.dtype, device=HOST)
        if self.numel():
            self.place.read(self._start(), memory_at(buffer.data_ptr(), buffer.nbytes))
        return buffer.as_strided(self.shape, self.stride())

    def write_back(self, copy: torch.Tensor) -> None:
        """Write a changed copy back."""
        memory = copy.untyped_storage()
        if memory.nbytes():
            self.place.write(self._start(), memory_at(memory.data_ptr(), memory.nbytes()))

    def _start(self) -> int:
        """Its first byte within its place."""
        return int(self.like.storage_offset()) * self.itemsize

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.in_memory())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.in_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.in_memory()
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view(func):
            return _viewed(func, args, kwargs)
        copies: dict[int, torch.Tensor] = {}
        originals: dict[int, DiskTensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DiskTensor):
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.in_memory()
                originals[id(copies[id(tensor)])] = tensor
            return copies[id(tensor)]

        positions, names = written_arguments(func)
        written = [args[each] for each in positions if each < len(args)] + [kwargs[each] for each in names & {*kwargs}]
        with ExitStack() as changing:
            # A strided tensor is read and written with the elements in between, which another thread may be loading.
            for place in _places(written):
                changing.enter_context(place.changing)
            out = func(*map_tensors(real, args), **map_tensors(real, kwargs))
            map_tensors(lambda tensor: _put_back(tensor, copies), written)
        return map_tensors(lambda tensor: originals.get(id(tensor), tensor), out)


def _places(tensors: list[Any]) -> list[Place]:
    """The places of the tensors that are in files, always in the same order, because several are locked at once."""
    found: dict[int, Place] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DiskTensor):
            found[id(tensor.place)] = tensor.place
        return tensor

    map_tensors(note, tensors)
    return [found[key] for key in sorted(found)]


def _put_back(tensor: torch.Tensor, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, DiskTensor):
        tensor.write_back(copies[id(tensor)])
    return tensor


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a view operation, computed without values."""
    [source] = [each for each in (*args, *kwargs.values()) if isinstance(each, DiskTensor)]
    swap = lambda tensor: tensor.like if tensor is source else tensor  # noqa: E731
    out = func(*map_tensors(swap, args), **map_tensors(swap, kwargs))
    return map_tensors(lambda tensor: DiskTensor(tensor, source.place), out)
