"""Streams that exist only as clocks, to prove on the CPU that memory is safe on an accelerator.

Everything runs at once, but each stream counts what was given to it, an event remembers how far its stream and all that
this stream had waited for had come (a vector clock), and waiting merges clocks. "A has waited for B's work so far" is
then a comparison, made at the moments that matter: when memory is freed, and when a stream reads what another wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.runtime.streams import Streams

Clock = dict[str, int]


class SimulatedStreams(Streams):
    """`Streams` with `lazy = False`, as on an accelerator; the current stream is ``compute`` outside of the blocks."""

    lazy = False

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {name: {} for name in ("compute", "gather", "reduce", "all_reduce")}
        self.current = "compute"

    def tick(self) -> Clock:
        """Give work to the current stream; its clock after it."""
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        return dict(clock)

    def has_waited_for(self, clock: Clock) -> bool:
        """Whether the current stream comes after all that `clock` stands for."""
        mine = self.clocks[self.current]
        return all(mine.get(name, 0) >= count for name, count in clock.items())

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def gathering(self):  # type: ignore[no-untyped-def]
        return self._on("gather")

    def reducing(self):  # type: ignore[no-untyped-def]
        return self._on("reduce")

    def all_reducing(self):  # type: ignore[no-untyped-def]
        return self._on("all_reduce")

    def record(self) -> Clock:  # type: ignore[override]
        return self.tick()

    def wait(self, event: Clock | None) -> None:  # type: ignore[override]
        if event is not None:
            clock = self.clocks[self.current]
            for name, count in event.items():
                clock[name] = max(clock.get(name, 0), count)
