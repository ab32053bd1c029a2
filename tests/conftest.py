"""Session-wide set-up: one thread per process, pools closed at the end, what the `gpu` marker means, known warnings."""

from __future__ import annotations

from collections.abc import Iterator

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
