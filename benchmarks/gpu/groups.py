"""A process group that exists once: one process is rank 0 of many, and its collectives reach nobody.

Allocations, copies and kernels around the collectives are real. What the collectives themselves do is chosen:

* ``nothing``: a reduce-scatter takes this rank's rows; an all-gather does nothing (this rank's rows are in place);
* ``copy``: the rows of the others are filled as well, with this rank's own, as much traffic in memory as a real
  all-gather makes on the receiving side;
* ``timed``: as ``copy``, and besides the group's stream is occupied for ``latency + bytes / bandwidth``, by a kernel of
  one thread. Not modelled: what NCCL's own kernels take from compute, multiprocessors and bandwidth of memory.

As with NCCL, the group has a stream of its own, which waits for the caller's at each call, and `Work.wait` makes the
current stream wait for it. The rows that are filled in make numbers deterministic, so that a race shows in the loss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import synchronize

BACKEND = "simulated"


@dataclass(frozen=True)
class Wire:
    """What the collectives do.

    Attributes:
        fills: the rows of the other ranks get this rank's values.
        bandwidth_bytes: a second that a rank receives; None: no time.
        latency_s: of each collective, if there is a bandwidth.
        delay_s: one more occupation of the group's stream at each collective, to make races show.
    """

    fills: bool = True
    bandwidth_bytes: float | None = None
    latency_s: float = 20e-6
    delay_s: float = 0.0

    def seconds(self, received_bytes: float) -> float:
        """For how long a collective occupies the stream."""
        timed = 0.0 if self.bandwidth_bytes is None else self.latency_s + received_bytes / self.bandwidth_bytes
        return timed + self.delay_s


_wire = Wire()
_cycles_per_s: list[float] = []


def use_wire(wire: Wire) -> None:
    """For all groups of this process, from now on."""
    global _wire
    _wire = wire


def take_gpu() -> None:
    """The first GPU is this process's, if there is one; known before a mesh is made, which otherwise warns."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.set_device(0)


def share_gpu() -> None:
    """Let processes that share a GPU have NCCL, which refuses two ranks on one device of one machine: each says that it
    is a machine of its own, and they talk by sockets. Kernels, streams and communicators are those of many machines.
    The GPU gives each process its turn, so no time means anything. Before the first communicator."""
    os.environ.update(NCCL_HOSTID=f"process {os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ["NCCL_MAX_NCHANNELS"] = "2"  # fewer blocks that only wait, for another process's turn


def occupy(seconds: float) -> None:
    """Keep the current stream busy, on a GPU; for an instant at least, so that a profile shows whose stream it is."""
    if torch.cuda.is_available():
        torch.cuda._sleep(max(1, int(seconds * cycles_per_s()) if seconds else 0))


def cycles_per_s() -> float:
    """How fast `torch.cuda._sleep` counts here; measured once."""
    if not _cycles_per_s:
        num_cycles = 20_000_000
        torch.cuda._sleep(num_cycles)
        synchronize("cuda")
        start = time.perf_counter()
        torch.cuda._sleep(num_cycles)
        synchronize("cuda")
        _cycles_per_s.append(num_cycles / (time.perf_counter() - start))
    return _cycles_per_s[0]


class Done(dist._Work):
    """A collective that has been issued. Keeps its tensors until somebody waits, as NCCL's does."""

    def __init__(self, event: torch.cuda.Event | None, kept: Sequence[torch.Tensor]):
        super().__init__()
        self._event = event
        self._kept: Sequence[torch.Tensor] = kept

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return self._event is None or self._event.query()


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 (or another) of a group of which nobody else exists. See the module docstring."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._stream: torch.cuda.Stream | None = None
        self._name = ""

    def _run(self, tensors: Sequence[torch.Tensor], received_bytes: float, fill: Callable[[], None]) -> Done:
        if not tensors or tensors[0].device.type != "cuda":
            with torch.no_grad():
                fill()
            return Done(None, ())
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            occupy(_wire.seconds(received_bytes))
            fill()
            event = torch.cuda.Event()
            event.record()
        return Done(event, tuple(tensors))

    def _gathered(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Done:
        def fill() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                rows = output.view(self._size, -1)
                if _wire.fills:
                    rows.copy_(source.reshape(1, -1).expand_as(rows))
                elif rows[self._rank].data_ptr() != source.data_ptr():
                    rows[self._rank].copy_(source.reshape(-1))

        received = sum(output.nbytes for output in outputs) * (self._size - 1) / self._size
        return self._run([*outputs, *inputs], received, fill)

    def _scattered(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Done:
        def fill() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(source.view(self._size, -1)[self._rank])

        received = sum(source.nbytes for source in inputs) * (self._size - 1) / self._size
        return self._run([*outputs, *inputs], received, fill)

    # --- what torch calls; names changed in 2.13 ---------------------------------------------------------------------

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Done:
        """Flat all-gather."""
        return self._gathered([output], [source])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Done:
        """Several in one."""
        return self._gathered(outputs, sources)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Done:
        """Flat reduce-scatter."""
        return self._scattered([output], [source])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Done:
        """Several in one."""
        return self._scattered(outputs, sources)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """Leaves the values as they are; takes the time of a reduce-scatter and an all-gather."""
        received = 2 * sum(tensor.nbytes for tensor in tensors) * (self._size - 1) / self._size
        return self._run(tensors, received, lambda: None)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """From this rank, as it were."""
        return self._run(tensors, 0, lambda: None)

    def allgather(self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None) -> Done:
        """To lists."""

        def fill() -> None:
            for rows, source in zip(outputs, sources, strict=True):
                for row in rows:
                    row.copy_(source)

        return self._run(sources, 0, fill)

    def barrier(self, opts: Any = None) -> Done:
        """Nobody to wait for."""
        return Done(None, ())

    def size(self) -> int:
        """How many ranks there would be."""
        return self._size

    def getBackendName(self) -> str:
        """For messages."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """As torch's own groups have it."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """The same."""
        return self.pg_name


def init_simulated(ranks: int, wire: Wire) -> None:
    """Make this process rank 0 of `ranks`."""
    take_gpu()
    use_wire(wire)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: SimulatedGroup(rank, size), devices=["cpu", "cuda"]
        )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)


@contextmanager
def simulated(ranks: int = 8, wire: Wire | None = None) -> Iterator[None]:
    """Within, this process is rank 0 of `ranks`."""
    init_simulated(ranks, Wire() if wire is None else wire)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Within, this process is a world of its own, with NCCL on a GPU."""
    take_gpu()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
