"""`Clock`: simulated time: how long a step takes, given the times of operators and messages. Layer: plan.

It is a `Streams`, so the runtime itself decides what waits for what. Work is added to the current stream, and begins
when the stream is free. An event is the time at which its stream will be done; waiting for it advances a stream to that
time. Messages have a queue per process group, and background optimizers have a stream. The CPU has one stream for
everything except messages.
"""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from fsdp2.runtime.streams import Streams, at_once
from fsdp2.trace.timeline import Span

__all__ = ["Clock"]

COMPUTE = "compute"


class Moment(Future[None]):
    """An event, or a background task: the time at which its stream will have done all earlier work."""

    def __init__(self, clock: "Clock", seconds: float):
        super().__init__()
        self.set_result(None)
        self.seconds = seconds
        self._clock = clock

    def result(self, timeout: float | None = None) -> None:
        """Wait for it."""
        self._clock.arrive(self.seconds)

    synchronize = result


class Clock(Streams):
    """The time of each stream, and of each process group's messages, in seconds since the start.

    Args:
        lazy: as on the CPU (see `Streams`).

    Attributes:
        origin: the time from which the other attributes count.
        spans: what ran when.
        exposed: seconds for which compute waited for messages, copies, or steps on the host.
    """

    def __init__(self, lazy: bool):
        self.lazy = lazy
        self.later: Any = partial if lazy else at_once
        self.origin = 0.0
        self.spans: list[Span] = []
        self.exposed = 0.0
        self._current = COMPUTE
        self._free_at: dict[str | dist.ProcessGroup, float] = defaultdict(float)

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer steps in the background."""
        return self._current == "optimizer"

    @property
    def elapsed(self) -> float:
        """Seconds until compute will have done its work so far."""
        return self._free_at[COMPUTE] - self.origin

    @property
    def end(self) -> float:
        """The time at which everything will be done."""
        return max(self._free_at.values())

    def restart(self) -> None:
        """Count from now on."""
        self.origin, self.spans, self.exposed = self._free_at[COMPUTE], [], 0.0

    def work(self, lane: str, name: str, seconds: float) -> None:
        """Add work of `seconds` to the current stream."""
        begin = self._free_at[self._current]
        end = self._free_at[self._current] = begin + seconds
        if seconds:
            self._note(lane if self._current == COMPUTE else self._current, name, begin, end)

    def message(self, wire: dist.ProcessGroup, lane: str, name: str, seconds: float, follows: bool = True) -> float:
        """Send a message after earlier ones on the same `wire`, once the current stream has reached this point. Returns
        its arrival time. With `follows` False it does not delay later ones, because it goes in the other direction."""
        begin = max(self._free_at[self._current], self._free_at[wire])
        end = begin + seconds
        if follows:
            self._free_at[wire] = end
            self._note(lane, name, begin, end)
        return end

    def arrive(self, seconds: float) -> None:
        """Let the current stream wait for something that arrives at this time."""
        begin = self._free_at[self._current]
        if seconds > begin and self._current == COMPUTE:
            self.exposed += seconds - begin
            self._note("waiting", "", begin, seconds)
        self._free_at[self._current] = max(begin, seconds)

    def _note(self, lane: str, name: str, begin: float, end: float) -> None:
        """Record a span, merged with the previous one in its lane if they are contiguous and have the same name."""
        begin, end = max(begin - self.origin, 0.0), end - self.origin
        for last in reversed(self.spans[-4:]):
            if (last.lane, last.name) == (lane, name) and begin - last.end_s < 1e-5:
                last.end_s = end
                return
        self.spans.append(Span(lane, name, begin, end))

    # --- the interface of Streams ------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[object]:
        return self._on("all-gather")

    def reducing(self) -> AbstractContextManager[object]:
        return self._on("reduce-scatter")

    def all_reducing(self) -> AbstractContextManager[object]:
        return self._on("all-reduce")

    def copying(self) -> AbstractContextManager[object]:
        return self._on("copies")

    def stepping(self) -> AbstractContextManager[object]:
        return self._on("optimizer")

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before = self._current
        self._current = before if self.lazy else stream
        try:
            yield
        finally:
            self._current = before

    def record(self) -> Any:
        return None if self.lazy else Moment(self, self._free_at[self._current])

    def wait(self, event: Any) -> None:
        if event is not None:
            self.arrive(event.seconds)
