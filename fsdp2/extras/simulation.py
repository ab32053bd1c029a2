"""Steps without a device: streams that only count. Layer: extras."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.runtime.streams import SIMULATED, Streams


@contextmanager
def simulated(streams: Streams) -> Iterator[None]:
    """Roots that run for the first time in the block use `streams`, whatever their device."""
    SIMULATED.append(streams)
    try:
        yield
    finally:
        SIMULATED.remove(streams)


def simulation() -> Streams | None:
    """What `simulated` was given, within its block."""
    return SIMULATED[-1] if SIMULATED else None
