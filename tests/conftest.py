"""Session-wide set-up: one thread per process, pools closed at the end, what the `gpu` marker means, known warnings, no
name server."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Torch's store looks up the name of every address it connects to or from, and a name server is asked for that of
# ::ffff:127.0.0.1. An answer that is lost costs five seconds, more than ranks wait for each other in some tests. So
# nobody is asked, here and in all processes that tests start, and torch does not warn of that. Before its import.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
import torch

from tests.ranks import close_pools
from tests.ranks_worker import IGNORED_WARNINGS


def pytest_configure(config: pytest.Config) -> None:
    for pattern in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{pattern}")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    close_pools()
