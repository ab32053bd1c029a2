"""Streams that exist only as clocks. Everything runs at once, on the CPU, but each stream counts what was given to it.

A stream's *clock* says how far it, and every stream that it has waited for, had come (a vector clock). An event is a
copy of a clock, and waiting merges clocks. The host is one more agent: work that it enqueues comes after all that it
has waited for. "A has waited for B's work so far" is then a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.runtime.streams import Streams, at_once

__all__ = ["HOST", "Clock", "Event", "SimulatedStreams"]

Clock = dict[str, int]
HOST = "host"


class Event:
    """What `SimulatedStreams.record` returns."""

    def __init__(self, clock: Clock, streams: SimulatedStreams):
        self.clock = clock
        self._streams = streams

    def wait(self) -> None:
        """Make the current stream wait."""
        self._streams.wait(self)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        """Make the host wait."""
        merge(self._streams.clocks[HOST], self.clock)


class SimulatedStreams(Streams):
    """`Streams` with `lazy = False`, as on an accelerator; the current stream is ``compute`` outside of the blocks.

    Attributes:
        clocks: of each stream, and of the host.
        current: the name of the current stream.
    """

    lazy = False
    later = staticmethod(at_once)

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {
            name: {} for name in ("compute", "gather", "reduce", "all_reduce", "step", "copy", HOST)
        }
        self.current = "compute"

    def tick(self, name: str | None = None) -> Clock:
        """Give work to a stream (the current one); its clock after it."""
        name = self.current if name is None else name
        clock = self.clocks.setdefault(name, {})
        merge(clock, self.clocks[HOST])
        clock[name] = clock.get(name, 0) + 1
        return dict(clock)

    def has_waited_for(self, clock: Clock) -> bool:
        """Whether work that is given to the current stream now comes after all that `clock` stands for."""
        mine, host = self.clocks[self.current], self.clocks[HOST]
        return all(max(mine.get(name, 0), host.get(name, 0)) >= count for name, count in clock.items())

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Make `name` the current stream."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def gathering(self):  # type: ignore[no-untyped-def]
        return self.on("gather")

    def reducing(self):  # type: ignore[no-untyped-def]
        return self.on("reduce")

    def all_reducing(self):  # type: ignore[no-untyped-def]
        return self.on("all_reduce")

    def stepping(self):  # type: ignore[no-untyped-def]
        return self.on("step")

    def copying(self):  # type: ignore[no-untyped-def]
        return self.on("copy")

    def record(self) -> Event:  # type: ignore[override]
        return Event(dict(self.clocks.setdefault(self.current, {})), self)

    def wait(self, event: Event | None) -> None:  # type: ignore[override]
        if event is not None:
            merge(self.clocks.setdefault(self.current, {}), event.clock)


def merge(clock: Clock, other: Clock) -> None:
    """`clock` comes after `other`."""
    for name, count in other.items():
        if clock.get(name, 0) < count:
            clock[name] = count
