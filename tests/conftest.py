"""Session-wide set-up: one thread per process, pools closed at the end, which cases are in the protective tier, what
the `gpu` marker means, known warnings, no name server."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

# Torch's store looks up the name of every address it connects to or from, and a name server is asked for that of
# ::ffff:127.0.0.1. An answer that is lost costs five seconds, more than ranks wait for each other in some tests. So
# nobody is asked, here and in all processes that tests start, and torch does not warn of that. Before its import.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# gloo sends while it holds a lock. With more ranks than cores, the thread that a message wakes takes the sender's core,
# and the sender's own receiving thread spins for the lock until the sender runs again. So who is woken waits its turn.
if sys.platform == "linux":
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import pytest
import torch

from tests.helpers.ranks import close_pools
from tests.helpers.ranks_worker import IGNORED_WARNINGS, RACES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--races", action="store_true", help="run what runs on ranks under the race detector")
    parser.addoption("--campaigns", action="store_true", help="run all of long campaigns, not only their beginnings")


def pytest_configure(config: pytest.Config) -> None:
    for pattern in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{pattern}")
    torch.set_num_threads(1)
    if config.getoption("--races"):
        os.environ[RACES] = "1"


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("-m") != "not exhaustive":
        return None
    return (
        "grids are sampled: of a test on ranks two cases run here, on four ranks one; `make test-all` runs all of them"
    )


# The modules that take longest begin, or one worker would end with them alone.
LONGEST = (
    "tests/instruments/races/test_programs.py",
    "tests/instruments/device/test_mutants.py",
    "tests/instruments/device/test_training.py",
)
MAX_PROTECTIVE_CASES = 2
MAX_PROTECTIVE_CASES_ON_MANY_RANKS = 1  # four and more, where each takes twice as long


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample_large_grids(items)
    if not config.getoption("--campaigns"):
        left = [item for item in items if item.get_closest_marker("campaign") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("campaign") is None]
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONGEST)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    close_pools()


def _sample_large_grids(items: list[pytest.Item]) -> None:
    """Of a test on ranks, or one marked `sampled`, with many cases the protective tier runs a sample, evenly spread;
    the others are `exhaustive`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_long = _num_ranks(item) > 0 or item.get_closest_marker("sampled") is not None
        if is_long and item.get_closest_marker("exhaustive") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        limit = MAX_PROTECTIVE_CASES_ON_MANY_RANKS if _num_ranks(found[0]) >= 4 else MAX_PROTECTIVE_CASES
        if len(found) > limit:
            sample = {index * len(found) // limit for index in range(limit)}
            for index, item in enumerate(found):
                if index not in sample:
                    item.add_marker(pytest.mark.exhaustive)


def _num_ranks(item: pytest.Item) -> int:
    """0 for a test that does not run on ranks."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("world_size", 0) if callspec is not None else 0
