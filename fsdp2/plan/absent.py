"""Process groups whose other ranks do not exist: a step of one rank of thousands, in one process. Layer: plan.

Collectives touch no memory. They say what would be sent, to a `Wire`, and their handles finish in its time. What ranks
tell each other through the store (`fsdp2.parallel` compares configs) is answered with this rank's own words, because a
plan is about ranks that do the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp2.comm import COMMS
from fsdp2.comm.base import Comm
from fsdp2.errors import OrderError

__all__ = ["Wire", "absent_ranks"]

BACKEND = "fsdp2_absent"


class Wire(Protocol):
    """Where messages go."""

    def send(
        self, kind: str, tensors: Sequence[torch.Tensor], nbytes: int, group: dist.ProcessGroup, both: bool = True
    ) -> Callable[[], None]:
        """This rank sends `nbytes` in `group`, from or into these tensors. Returns a function that waits for the end.
        With `both` False only one direction is used (a message that is received, not sent)."""


class Arriving(dist.Work):
    """A message in flight."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        """Wait for it."""
        self._wait()
        return True


class AbsentGroup(dist.ProcessGroup):
    """The collectives that sharding needs, and those with which DTensor and clipping set out; others fail."""

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        init: Any = super().__init__  # before 2.15 torch's stubs know only the other constructor
        init(rank, size)
        self._wire = wire
        self._own_name = ""

    @property
    def group_name(self) -> Any:
        """The base class asks its backend, and here is none."""
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _send(self, kind: str, tensors: Sequence[torch.Tensor], nbytes: float, both: bool = True) -> Arriving:
        return Arriving(self._wire.send(kind, tensors, int(nbytes), self, both))

    def _share(self) -> float:
        """What of the whole result a rank sends in a ring."""
        return (self.size() - 1) / self.size()

    # --- messages (gloo) ----------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Arriving:
        """One rank's rows to another."""
        return self._send("send", tensors, tensors[0].nbytes)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Arriving:
        """What another rank sends."""
        return self._send("recv", tensors, tensors[0].nbytes, both=False)

    # --- collectives --------------------------------------------------------------------------------------------------

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Arriving:
        """Several flat all-gathers."""
        nbytes = sum(output.nbytes for output in outputs)
        return self._send("all_gather", [*outputs, *inputs], nbytes * self._share())

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Arriving:
        """Several flat reduce-scatters."""
        nbytes = sum(source.nbytes for source in inputs)
        return self._send("reduce_scatter", [*outputs, *inputs], nbytes * self._share())

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Arriving:
        """A flat all-gather."""
        return self.all_gather_single_coalesced([output], [source])

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Arriving:
        """A flat reduce-scatter."""
        return self.reduce_scatter_single_coalesced([output], [source])

    def allreduce(self, tensors: Any, options: Any = None, timeout: Any = None) -> Arriving:
        """An all-reduce."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return self._send("all_reduce", tensors, 2 * nbytes * self._share())

    def _once(self, *args: Any, **kwargs: Any) -> Arriving:
        """What happens before training only."""
        return Arriving(lambda: None)

    broadcast = scatter = barrier = _once


class Echo(dist.Store):  # type: ignore[name-defined, misc]  # torch's stubs leave it out
    """A store in which every other rank has written what this one wrote last."""

    def __init__(self) -> None:
        super().__init__()
        self._last = b""

    def set(self, key: str, value: Any) -> None:
        """Write."""
        self._last = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Read."""
        return self._last

    def wait(self, *args: Any) -> None:
        """Everything is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether it is there."""
        return True

    def add(self, key: str, number: int) -> int:
        """Count."""
        return number


_wires: list[Wire] = []


def _create(store: Any, rank: int, size: int, timeout: Any) -> AbsentGroup:
    return AbsentGroup(rank, size, _wires[-1])


@contextmanager
def absent_ranks(world_size: int, rank: int, comm: Comm, wire: Wire) -> Iterator[None]:
    """Let this process be `rank` of `world_size` for the block; units communicate through `comm`.

    Raises:
        OrderError: this process has a process group already.
    """
    if dist.is_initialized():
        raise OrderError(
            "plan: this process has a process group, and a plan makes one of ranks that do not exist. Plan before "
            "init_process_group(), or in a process of its own"
        )
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    COMMS[BACKEND] = comm
    _wires.append(wire)
    store = Echo()  # a reference of ours: without one torch finds the methods of the base class
    try:
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        _wires.pop()
        del COMMS[BACKEND]
