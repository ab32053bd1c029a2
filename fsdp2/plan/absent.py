"""Process groups whose other ranks do not exist: a step of one rank of thousands, in one process. Layer: plan.

Collectives touch no memory. They report what would be sent to a `Wire`, which decides when their handles finish. The
store returns this rank's own values for other ranks (`fsdp2.parallel` compares configs), because a plan assumes that
all ranks do the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.comm import COMMS
from fsdp2.comm.base import Comm
from fsdp2.errors import OrderError

__all__ = ["Wire", "absent_ranks"]

BACKEND = "fsdp2_absent"


# Called for each message of this rank, with its kind, the tensors sent or received, the number of bytes, the group, and
# whether both directions of a link are used (False for a received message). Returns a function that waits for its end.
Wire = Callable[[str, Sequence[torch.Tensor], int, dist.ProcessGroup, bool], Callable[[], None]]


class Arriving(dist.Work):
    """A message in flight."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True


class AbsentGroup(dist.ProcessGroup):
    """The collectives that sharding needs, and those that DTensor and clipping start with; others fail. In a ring a
    rank sends the whole result except its own part."""

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        init: Any = super().__init__  # before 2.15 torch's stubs know only the other constructor
        init(rank, size)
        self._wire = wire
        self._own_name = ""

    @property
    def group_name(self) -> Any:
        """Overrides the base class, which asks its backend: there is none here."""
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _send(self, kind: str, tensors: Sequence[torch.Tensor], nbytes: int, both: bool = True) -> Arriving:
        return Arriving(self._wire(kind, tensors, nbytes, self, both))

    def _in_ring(self, kind: str, result: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> Arriving:
        nbytes = sum(tensor.nbytes for tensor in result) * (2 if kind == "all_reduce" else 1)
        return self._send(kind, [*result, *others], int(nbytes * ((self.size() - 1) / self.size())))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Arriving:
        return self._send("send", tensors, tensors[0].nbytes)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Arriving:
        return self._send("recv", tensors, tensors[0].nbytes, both=False)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Arriving:
        return self._in_ring("all_gather", outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Arriving:
        return self._in_ring("reduce_scatter", inputs, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Arriving:
        return self._in_ring("all_gather", [output], [source])

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Arriving:
        return self._in_ring("reduce_scatter", [source], [output])

    def allreduce(self, tensors: Any, options: Any = None, timeout: Any = None) -> Arriving:
        return self._in_ring("all_reduce", tensors)

    def _once(self, *args: Any, **kwargs: Any) -> Arriving:
        """Collectives that only happen before training."""
        return Arriving(lambda: None)

    broadcast = scatter = barrier = _once


class Echo(dist.Store):  # type: ignore[name-defined, misc]  # torch's stubs leave it out
    """A store in which every other rank has written the last value that this rank wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._last = b""

    def set(self, key: str, value: Any) -> None:
        self._last = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._last

    def wait(self, *args: Any) -> None:
        """Returns at once: every key exists."""

    def add(self, key: str, number: int) -> int:
        return number


_wires: list[Wire] = []


@contextmanager
def absent_ranks(world_size: int, rank: int, comm: Comm, wire: Wire) -> Iterator[None]:
    """In the block, this process is `rank` of `world_size`, and units communicate through `comm`.

    Raises:
        OrderError: this process has a process group already.
    """
    if dist.is_initialized():
        raise OrderError(
            "plan: this process has a process group, and a plan makes another one, of ranks that do not exist. Plan "
            "before init_process_group(), or in a separate process"
        )
    if BACKEND not in dist.Backend.backend_list:
        create = lambda store, rank, size, timeout: AbsentGroup(rank, size, _wires[-1])  # noqa: E731
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    COMMS[BACKEND] = comm
    _wires.append(wire)
    store = Echo()  # keep a reference: without one torch calls the methods of the base class
    try:
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        _wires.pop()
        del COMMS[BACKEND]
