"""`Clock`: simulated time. What a step takes, if operators and messages take what they are said to take. Layer: plan.

It is a `Streams`, so the runtime itself decides what waits for what. Work is given to the stream that is current, and
begins when the stream is free, and not before the host has issued it. An event is the time at which its stream will
have finished; to wait for it moves a stream to that time. Messages have a queue for each process group.

An accelerator's host runs ahead. On the CPU the host is what computes: it has one stream, and waits for messages.
Optimizers that step in the background have a thread, whose time is its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fsdp2.runtime.streams import Streams
from fsdp2.trace.timeline import Span

__all__ = ["Clock"]

COMPUTE = "compute"


class Moment:
    """A recorded event: when its stream will have done all that it was given before."""

    def __init__(self, clock: "Clock", seconds: float):
        self.clock = clock
        self.seconds = seconds

    def synchronize(self) -> None:
        """Let the host wait."""
        self.clock.host = max(self.clock.host, self.seconds)


class Issued(Future[None]):
    """A task of the background: its thread has issued everything at some time, until which `result` waits."""

    def __init__(self, clock: "Clock", seconds: float):
        super().__init__()
        self.set_result(None)
        self._moment = Moment(clock, seconds)

    def result(self, timeout: float | None = None) -> None:
        """Let the host wait."""
        self._moment.synchronize()


class Clock(Streams):
    """The time of each stream, of the host and of each process group's messages; in seconds since the start.

    Args:
        lazy: as on the CPU (see `Streams`).

    Attributes:
        host: how far the host is.
        spans: what ran when.
        exposed: seconds for which compute waited for messages although the host had more for it to do.
    """

    def __init__(self, lazy: bool):
        self.lazy = lazy
        self.host = 0.0
        self.spans: list[Span] = []
        self.exposed = 0.0
        self._current = COMPUTE
        self._thread = 0.0
        self._free_at: dict[str, float] = {}
        self._wires: dict[int, float] = {}

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer steps in the background."""
        return self._current == "optimizer"

    @property
    def now(self) -> float:
        """When compute will have done what it was given so far."""
        return self._free_at.get(COMPUTE, 0.0)

    @property
    def end(self) -> float:
        """When everything will be done."""
        return max([self.host, *self._free_at.values(), *self._wires.values()])

    def work(self, lane: str, name: str, seconds: float, host_seconds: float = 0.0) -> None:
        """Give the current stream work of `seconds`, which the host takes `host_seconds` to issue."""
        self.host += host_seconds
        if host_seconds and not self.lazy:
            self._note("host", name, self.host - host_seconds, self.host)
        free = self._free_at.get(self._current, 0.0)
        begin = max(free, self.host)
        end = self._free_at[self._current] = begin + seconds
        if self.lazy:
            self.host = end
            begin = free  # what the host does in between is the same work
        if seconds:
            self._note(lane if self._current == COMPUTE else self._current, name, begin, end)

    def think(self, lane: str, name: str, seconds: float) -> None:
        """The host itself computes."""
        begin, self.host = self.host, self.host + seconds
        self._note(lane, name, begin, self.host)

    def message(self, wire: int, lane: str, name: str, seconds: float, follows: bool = True) -> float:
        """Send a message behind those of the same `wire`, once the current stream has come so far. Returns when it will
        have arrived. With `follows` False it does not keep later ones waiting (it goes the other way)."""
        begin = max(self._free_at.get(self._current, 0.0), self.host, self._wires.get(wire, 0.0))
        end = begin + seconds
        if follows:
            self._wires[wire] = end
            self._note(lane, name, begin, end)
        return end

    def arrive(self, seconds: float) -> None:
        """The current stream needs what arrives at that time."""
        begin = max(self._free_at.get(self._current, 0.0), self.host)
        if seconds > begin and self._current == COMPUTE:
            self.exposed += seconds - begin
            self._note("waiting", "", begin, seconds)
        self._free_at[self._current] = max(self._free_at.get(self._current, 0.0), seconds)
        if self.lazy:
            self.host = max(self.host, seconds)

    def _note(self, lane: str, name: str, begin: float, end: float) -> None:
        """Remember a span, joined with the one before it in its lane where they are one."""
        for last in reversed(self.spans[-4:]):
            if (last.lane, last.name) == (lane, name) and begin - last.end_s < 1e-5:
                last.end_s = end
                return
        self.spans.append(Span(lane, name, begin, end))

    # --- as the runtime sees it --------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[object]:
        return self._on("all-gather")

    def reducing(self) -> AbstractContextManager[object]:
        return self._on("reduce-scatter")

    def all_reducing(self) -> AbstractContextManager[object]:
        return self._on("all-reduce")

    def copying(self) -> AbstractContextManager[object]:
        return self._on("copies")

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The block is one of the thread in the background, on the stream that it has."""
        if self.lazy:
            yield
            return
        caller, self.host = self.host, max(self.host, self._thread)
        try:
            with self._on("optimizer"):
                yield
        finally:
            self._thread, self.host = self.host, caller

    def behind(self, task: Callable[[], None]) -> Future[None]:
        """See `Streams`."""
        task()
        return Issued(self, self._thread)

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before = self._current
        self._current = before if self.lazy else stream
        try:
            yield
        finally:
            self._current = before

    def record(self) -> Any:
        """See `Streams`."""
        return None if self.lazy else Moment(self, max(self._free_at.get(self._current, 0.0), self.host))

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        if event is not None:
            self.arrive(event.seconds)
