"""Steps without a device: streams that only count. Layer: extras."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.runtime.streams import SIMULATED, Streams


@contextmanager
def simulated(streams: Streams) -> Iterator[None]:
    """Roots whose first forward is in the block use `streams`, whatever their device."""
    SIMULATED.append(streams)
    try:
        yield
    finally:
        SIMULATED.remove(streams)


def simulation() -> Streams | None:
    """The `streams` of the current `simulated` block, or None."""
    return SIMULATED[-1] if SIMULATED else None
