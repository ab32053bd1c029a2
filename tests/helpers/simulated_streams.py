"""Streams that exist only as clocks, to prove on the CPU that memory is safe on an accelerator.

Everything runs at once, but each stream counts what was given to it, an event remembers how far its stream and all that
this stream had waited for had come (a vector clock), and waiting merges clocks. "A has waited for B's work so far" is
then a comparison, made at the moments that matter: when memory is freed, and when a stream reads what another wrote.

`Watch` makes it at each of them; `make_model` and `train` are what is watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2.runtime import memory, storage
from fsdp2.runtime.extended import ExtendedGather
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


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64)) for _ in range(5)])


def train(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model.set_requires_gradient_sync(step != 0)
        model(x).square().mean().backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


def parts_of(memory: Any) -> list[storage.FlatStorage]:
    """The flat storages behind what a group releases as a whole."""
    if isinstance(memory, storage.Storages):
        return [flat for part in memory.parts for flat in parts_of(part)]
    return [memory._raw] if isinstance(memory, ExtendedGather) else [memory]


class Watch:
    """Checks every `alloc` and `free` of the library's flat storages against the simulated streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, streams: SimulatedStreams):
        self.streams = streams
        self.alive: dict[int, storage.FlatStorage] = {}
        self.released: dict[int, dict[str, int]] = {}
        self.most_alive_bytes = 0
        self.num_freed = 0
        alloc, free, release = storage.FlatStorage.alloc, storage.FlatStorage.free, memory.ReleasedMemory.release

        def watched_alloc(flat: storage.FlatStorage) -> None:
            assert streams.current == "gather"
            if id(flat) in self.released:
                assert streams.has_waited_for(self.released.pop(id(flat))), "taken back while compute may still read it"
            alloc(flat)
            self.alive[id(flat)] = flat
            self.most_alive_bytes = max(self.most_alive_bytes, sum(each.nbytes for each in self.alive.values()))

        def watched_free(flat: storage.FlatStorage) -> None:
            assert streams.current == "gather"
            if id(flat) in self.released:
                assert streams.has_waited_for(self.released.pop(id(flat))), "freed while compute may still read it"
                self.num_freed += 1
            free(flat)
            self.alive.pop(id(flat), None)  # what an extension releases early is freed once more with the group

        def watched_release(self_: memory.ReleasedMemory, flat: storage.FlatStorage) -> None:
            assert streams.current == "compute"
            at = streams.tick()
            for part in parts_of(flat):
                self.released[id(part)] = at
            release(self_, flat)

        monkeypatch.setattr(storage.FlatStorage, "alloc", watched_alloc)
        monkeypatch.setattr(storage.FlatStorage, "free", watched_free)
        monkeypatch.setattr(memory.ReleasedMemory, "release", watched_release)
