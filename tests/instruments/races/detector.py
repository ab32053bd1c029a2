"""A race detector for whole programs: what an accelerator might do in another order, found on the CPU.

Within `detecting()` the tensors of the CPU stand for those of an accelerator. Each operator of ``aten`` is given to the
current one of the `SimulatedStreams`, each of ``c10d`` to a stream of its process group, as with NCCL: it begins after
what the current stream had been given, and `Work.wait` lets the current stream wait for it. Operators run at once, so
the program computes what it always computes; only the clocks say what was ordered. Reported are

* two accesses to the same bytes, one of them a write, of which neither comes after the other;
* a read of bytes that nobody has filled since they were allocated, or that were freed (raised at once: there is no
  memory behind it);
* an allocation that may get the memory of a block which another stream may still use. As in torch's caching allocator,
  a block belongs to the stream that was current when it was allocated; once the host drops it, the next allocation on
  that stream may have it.

This is the idea of `torch.cuda._sanitizer`, with bytes instead of whole tensors, communication, the host, and freed
memory.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.extras.simulation import simulated
from tests.instruments.races.clocks import HOST, Clock, SimulatedStreams, merge
from tests.instruments.races.effects import Access, Effects, effects_of, tensors_in
from tests.instruments.races.memory import Memory, Operation, ranges_of
from tests.instruments.races.report import Race, Report, is_of_library, where

__all__ = ["HOME", "Detector", "FreedMemory", "detecting"]


HOME = torch.device("cpu", 0)  # host memory, see `host.py`
COMMUNICATION = "communication of"  # begins the names of the streams of process groups


class FreedMemory(Exception):
    """An operator reads or writes memory that has been freed."""


@dataclass
class Block:
    """A storage's memory.

    Attributes:
        stream: current when it was allocated; None if that was before the detector looked.
        storage: weak.
        is_alias: it is part of another block, which has a storage of its own.
    """

    start: int
    end: int
    stream: str | None
    storage: ref[torch.UntypedStorage]
    is_alias: bool = False


@dataclass
class Resized:
    """The storages that are freed and allocated again, which are those of unsharded parameters.

    Attributes:
        alive: bytes of each that is allocated, by id.
        most_bytes: the most that were allocated at a time.
        num_freed: how often one was freed.
        streams: that were current when one was allocated.
    """

    alive: dict[int, int] = field(default_factory=dict)
    most_bytes: int = 0
    num_freed: int = 0
    streams: set[str] = field(default_factory=set)

    def note(self, key: int, nbytes: int, stream: str) -> None:
        if nbytes:
            self.alive[key] = nbytes
            self.streams.add(stream)
            self.most_bytes = max(self.most_bytes, sum(self.alive.values()))
        else:
            self.num_freed += self.alive.pop(key, 0) > 0


class Detector(TorchDispatchMode):
    """Feeds operators into clocks and cells. Use `detecting`.

    Attributes:
        streams: what the library uses as the device's streams.
        report: the races so far.
        resized: counts of the storages that are resized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = SimulatedStreams()
        self.report = Report()
        self._wait, self._resize = dist.Work.wait, torch.UntypedStorage.resize_
        self.resized = Resized()
        self._memory = Memory()
        self._blocks: dict[int, Block] = {}
        self._dropped: deque[tuple[int, ref[torch.UntypedStorage]]] = deque()
        self._reusable: defaultdict[str, list[Operation]] = defaultdict(list)
        self._under_way: dict[dist.Work, Clock] = {}  # their ends
        self._finished: set[dist.Work] = set()  # of these, without the program's wait
        self._waiting = threading.RLock()  # one message of gloo ends one wait only; threads free memory too
        self._of_host: set[tuple[int, int]] = set()
        self._resized_at_host: WeakSet[torch.UntypedStorage] = WeakSet()
        self._functional: WeakKeyDictionary[torch.UntypedStorage, Clock] = WeakKeyDictionary()

    # --- operators ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)
        if any(each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # a DTensor or the like: seen again as the operators on the tensors within
        effects = effects_of(func)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False, "device": HOME}
        if effects.namespace == "c10d":
            return self._communicate(effects, func, args, kwargs)
        if effects.namespace.startswith("_c10d_functional"):
            return self._communicate_functionally(effects, func, args, kwargs)
        is_of_host, meets_host = self._host_takes_part(effects, args, kwargs)
        operation = self._enqueue(HOST if is_of_host else self.streams.current, effects.name)
        self._access(effects.accesses(args, kwargs), operation, effects.moves)
        result = func(*args, **kwargs)
        if effects.makes_outputs:
            self._note_outputs(result, operation, effects.fills_outputs)
        if effects.synchronises or (meets_host and not kwargs.get("non_blocking", len(args) > 2 and args[2])):
            merge(self.streams.clocks[HOST], self.streams.clocks[self.streams.current])
        return result

    def _host_takes_part(self, effects: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Whether all tensors are in host memory, so that the host runs the operator; whether some are."""
        device = kwargs.get("device")
        if device == HOME or (device is not None and not effects.arguments):  # the latter makes a tensor
            return device == HOME, False
        if not self._of_host:
            return False, False
        at_host = [self.belongs_to_host(each) for each in (*tensors_in(args), *tensors_in(list(kwargs.values())))]
        return bool(at_host) and all(at_host), any(at_host) and not all(at_host)

    def give_to_host(self, tensor: torch.Tensor) -> None:
        """The tensor's memory is pinned memory of the host."""
        storage = memory_of(tensor)
        if storage is not None and storage.nbytes():
            block = self._block_of(storage)
            block.stream = None  # the allocator of pinned memory waits for the streams that use a block
            self._of_host.add((block.start, block.end))

    def belongs_to_host(self, tensor: torch.Tensor) -> bool:
        """See `give_to_host`."""
        if not self._of_host or memory_of(tensor) is None:
            return False
        address = tensor.data_ptr()
        return any(start <= address < end for start, end in self._of_host)

    def _communicate(self, effects: Effects, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = next((dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject)), None)
        stream = f"{COMMUNICATION} {group.group_name if group is not None else 'a group'}"
        if effects.is_blocking(args, kwargs):
            stream = self.streams.current  # as NCCL does
        merge(self.streams.clocks.setdefault(stream, {}), self.streams.clocks[self.streams.current])
        operation = self._enqueue(stream, effects.name)
        self._access(effects.accesses(args, kwargs), operation, True)
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if isinstance(work, torch.ScriptObject):
            self._under_way[dist.Work.unbox(work)] = dict(self.streams.clocks[stream])
        return result

    def _communicate_functionally(
        self, effects: Effects, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The collectives of DTensor, whose results are waited for by an operator of its own."""
        if effects.name == "wait_tensor":
            result = func(*args, **kwargs)
            merge(self.streams.clocks[self.streams.current], self._functional.pop(args[0].untyped_storage(), {}))
            return result
        stream = "functional communication"
        merge(self.streams.clocks.setdefault(stream, {}), self.streams.clocks[self.streams.current])
        operation = self._enqueue(stream, effects.name)
        self._access(effects.accesses(args, kwargs), operation, True)
        result = func(*args, **kwargs)
        self._note_outputs(result, operation, True)
        for tensor in tensors_in(result):
            self._functional[tensor.untyped_storage()] = dict(self.streams.clocks[stream])
        return result

    def wait(self, work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        """`work.wait()`: the current stream comes after it. First, because gloo copies results within the wait."""
        if work not in self._under_way:  # as that of the watchdog, which must not wait for another wait to end
            return self._wait(work, *args, **kwargs)
        with self._waiting:
            merge(self.streams.clocks[self.streams.current], self._under_way.pop(work, {}))
            if work in self._finished:
                self._finished.remove(work)
                return True
            return self._wait(work, *args, **kwargs)

    def finish_works(self) -> None:
        """Wait for what the program has not waited for, without telling the clocks: gloo must not write into memory
        that is freed."""
        with self._waiting:
            for work in self._under_way.keys() - self._finished:
                self._wait(work)
                self._finished.add(work)

    # --- what they do to memory --------------------------------------------------------------------------------------

    def _enqueue(self, stream: str, name: str) -> Operation:
        return Operation(name, stream, self.streams.tick(stream)[stream], where())

    def _access(self, accesses: Iterator[tuple[torch.Tensor, Access]], operation: Operation, moves: bool) -> None:
        clock = self.streams.clocks[operation.stream]
        for tensor, access in accesses:
            storage = memory_of(tensor)
            if storage is None or not tensor.numel():
                continue
            if not storage.nbytes():
                raise FreedMemory(f"{operation.name} on stream '{operation.stream}' uses memory that was freed")
            self._block_of(storage)
            for start, end in ranges_of(tensor):
                if access is not Access.WRITE:
                    for other, nbytes in self._memory.read(start, end, operation, clock):
                        if moves if other is None else access is Access.UPDATE:
                            continue  # padding travels with the rows; of an update the write is reported
                        self._add(Race("read", operation, other, nbytes), moves)
                if access is not Access.READ:
                    for other, nbytes in self._memory.write(start, end, operation, clock):
                        self._add(Race("write", operation, other, nbytes), moves)

    def _note_outputs(self, result: Any, operation: Operation, filled: bool) -> None:
        self._forget_dropped()
        for tensor in tensors_in(result):
            storage = memory_of(tensor)
            if storage is None or not storage.nbytes() or (id(storage) in self._blocks and not self._moved(storage)):
                continue
            if not filled and not is_of_library(operation.stack):
                filled = True  # what a program does with its own empty tensors is its own affair
            block = self._block_of(storage, new_on=None if operation.stream == HOST else self.streams.current)
            if operation.stream == HOST:
                self._of_host.add((block.start, block.end))
            if filled and not block.is_alias:
                for _ in self._memory.write(block.start, block.end, operation, self.streams.clocks[operation.stream]):
                    pass  # nobody has used a new block

    def _add(self, race: Race, moves: bool) -> None:
        # The program goes on with the right values, as after other races. A message that races with an operator must be
        # issued first: the other rank may wait for it in the same way.
        if not moves or (race.other is not None and race.other.stream.startswith(COMMUNICATION)):
            self.finish_works()
        self.report.add(race)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _moved(self, storage: torch.UntypedStorage) -> bool:
        block = self._blocks[id(storage)]
        return block.start != storage.data_ptr() or block.end - block.start != storage.nbytes()

    def _block_of(self, storage: torch.UntypedStorage, new_on: str | None = None) -> Block:
        """The block of a storage that has memory.

        Args:
            new_on: if it is not known yet, it has just been allocated on this stream; None: it is older.
        """
        self._forget_dropped()
        key = id(storage)
        if key in self._blocks:
            if not self._moved(storage):
                return self._blocks[key]
            self._forget(key)
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        is_alias = self._memory.is_known(start, end) and self._belongs_to_another(start, end)
        block = Block(start, end, new_on, ref(storage, lambda dead: self._dropped.append((key, dead))), is_alias)
        self._blocks[key] = block
        if not is_alias:
            allocation = None if new_on is None else self._take(new_on)
            self._memory.allocate(start, end, filled=new_on is None, allocation=allocation)
        return block

    def _belongs_to_another(self, start: int, end: int) -> bool:
        """Whether a block that is still there has some of these addresses. One whose storage has moved, unseen (within
        an operator, as `resize_` and ``out=`` do), had its memory there before: it is forgotten."""
        over = [(key, block) for key, block in self._blocks.items() if block.start < end and start < block.end]
        is_there = False
        for key, block in over:
            storage = block.storage()
            if storage is None or self._moved(storage):
                self._forget(key)
            else:
                is_there = True
        return is_there

    def _take(self, stream: str) -> Operation:
        """A block was allocated on this stream: it may be one that was freed there."""
        clock = self.streams.clocks[stream]
        merge(clock, self.streams.clocks[HOST])
        operation = Operation("allocate", stream, clock.get(stream, 0), where())
        for access in self._reusable[stream]:
            if not access.is_before(clock):
                self.report.add(Race("reuse", operation, access, 0))
        self._reusable[stream].clear()
        return operation

    def _forget_dropped(self) -> None:
        while self._dropped:
            key, dead = self._dropped.popleft()
            if key in self._blocks and self._blocks[key].storage is dead:  # not another with its id
                self._forget(key)

    def _forget(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.is_alias:
            return
        accesses = self._memory.free(block.start, block.end)
        self._of_host.discard((block.start, block.end))
        if block.stream is not None:
            clock = self.streams.clocks[block.stream]
            self._reusable[block.stream] += [each for each in accesses if not each.is_before(clock)]

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> Any:
        """`storage.resize_(nbytes)`."""
        self.finish_works()
        stream = self.streams.current
        self._forget_dropped()
        before = storage.nbytes()
        if before:
            block = self._block_of(storage)
            if (block.start, block.end) in self._of_host:
                self._resized_at_host.add(storage)
            self._forget(id(storage))
        result = self._resize(storage, nbytes)  # moves the memory even to a size that it has
        if nbytes:
            at_host = storage in self._resized_at_host
            block = self._block_of(storage, new_on=None if at_host else stream)
            if at_host:
                self._of_host.add((block.start, block.end))
            if before:
                self._memory.allocate(block.start, block.end, filled=True)  # with a copy of what it held
        self.resized.note(id(storage), nbytes, stream)
        return result


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor whose elements are in memory; not of wrappers, such as those of `torch.func`."""
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return storage


@contextmanager
def detecting() -> Iterator[Detector]:
    """Run a block under the detector.

    Raises:
        AssertionError: races were found; the message lists them.
    """
    detector = Detector()
    with pytest.MonkeyPatch.context() as patch, simulated(detector.streams):
        patch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: detector.resize(storage, nbytes))
        patch.setattr(dist.Work, "wait", lambda work, *args, **kwargs: detector.wait(work, *args, **kwargs))
        with detector:
            yield detector
    detector.finish_works()
    detector.report.check()
