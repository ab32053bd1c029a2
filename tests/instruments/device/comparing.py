"""The lagging accelerator, with collectives that do not end where ranks do different things; for ranks that do."""

from typing import Any

from tests.instruments.device import lagging

__all__ = ["BACKENDS", "register"]

BACKENDS = lagging.BACKENDS


def register() -> Any:
    """See `lagging.register`."""
    native = lagging.register()
    native.compare_collectives()
    return native
