"""`on_device_ranks`: as `on_ranks`, on ranks that have a lagging device each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.ranks import on_ranks
from tests.instruments.device import lagging

__all__ = ["DEVICE", "SEEDS", "late", "on_device_ranks"]

DEVICE = "lag"
SEEDS = 20  # a missing wait shows in some of them


def on_device_ranks(*world_sizes: int, timeout_s: float = 120.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the body on every rank of a pool with lagging devices. Skipped, in one line, without a compiler."""
    missing = lagging.compiler() is None

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        test = on_ranks(*world_sizes, timeout_s=timeout_s, device=lagging.__name__)(body)
        test = pytest.mark.exhaustive(test)
        reason = "the lagging device needs a C++ compiler and Python's headers: apt install g++ python3-dev"
        return pytest.mark.skipif(missing, reason=reason)(test)

    return decorate


@contextmanager
def late(seed: int, max_us: int = 300) -> Iterator[None]:
    """Within the block some streams are late, as `seed` says."""
    lagging.set_delays(seed, max_us)
    try:
        yield
    finally:
        lagging.set_delays(0, 0)
