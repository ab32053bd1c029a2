"""Streams and events, with a stand-in for the CPU, so that the code above is the same for both. Layer: runtime.

On an accelerator work is *enqueued*: everything is issued at once, and waiting does not block the CPU. On the CPU work
*runs*: a wait blocks, so it is deferred until the result is needed. The runtime only looks at `Streams.lazy`.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch

from fsdp2.nothing import NOTHING

SIMULATED: list["Streams"] = []  # if not empty, the last one is used for every device


class Streams:
    """CPU stand-in without streams and events: waits for communication as late as possible. Runs no Python code.

    Attributes:
        gathering, reducing, all_reducing: run a block on the stream of these collectives.
        stepping: the same for optimizers that step in the background.
        copying: the same for activations that move to host memory and back.
        record: record an event on the current stream.
        wait: make the current stream wait for an event; does nothing for None.
        later: from ``wait`` and ``started``, a function that waits for the collective later. On an accelerator the
            current stream waits at once, and the result is None.
    """

    lazy = True
    gathering: Any = repeat(NOTHING).__next__
    reducing = all_reducing = stepping = copying = gathering
    record: Any = repeat(None).__next__
    wait: Any = {}.get
    later: Any = partial


def at_once(wait: Callable[[Any], None], started: Any) -> None:
    """`Streams.later` where ``wait(started)`` does not block."""
    wait(started)


class _Current:
    """Make a stream the current one for a block. Each block needs a new object: `with stream` stores the previous
    stream in the stream object, which two threads (before torch 2.12 also nested blocks) cannot share."""

    __slots__ = ("_before", "_device_index", "_stream")

    def __init__(self, stream: torch.Stream):
        self._stream = self._before = stream
        self._device_index = -1

    def __enter__(self) -> None:
        self._device_index = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)  # and its device

    def __exit__(self, *_error: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device_index != self._before.device_index:
            torch.accelerator.set_device_index(self._device_index)


class AcceleratorStreams(Streams):
    """The side streams of one device, shared by all roots. All but the last two have a higher priority than compute."""

    lazy = False
    later = staticmethod(at_once)

    def __init__(self, device: torch.device):
        self._device = device
        gather, reduce, all_reduce = (torch.Stream(device, priority=-1) for _ in range(3))
        self.gathering, self.reducing, self.all_reducing, self.stepping, self.copying = (
            partial(_Current, stream)
            for stream in (gather, reduce, all_reduce, torch.Stream(device), torch.Stream(device))
        )

    def record(self) -> torch.Event | None:
        return torch.accelerator.current_stream(self._device).record_event()

    def wait(self, event: torch.Event | None) -> None:
        if event is None:
            return
        # Not `stream.wait_event(event)`, which does not accept a user's torch.cuda.Event.
        if torch.accelerator.current_device_index() == self._device.index:
            event.wait()
        else:  # a thread that has not set its device: otherwise another device's stream would wait
            with torch.accelerator.device_index(self._device.index):
                event.wait()


@cache
def _made_for(device: torch.device) -> Streams:
    return Streams() if device.type == "cpu" else AcceleratorStreams(device)


def streams_for(device: torch.device) -> Streams:
    """The streams of `device`."""
    return SIMULATED[-1] if SIMULATED else _made_for(device)
