"""A plugin of pytest: tells all processes which test runs (`current`, see `tracing/sitecustomize.py`), and keeps names,
starts, failures and durations in `tests.jsonl`. Both are in the folder `MUTANTS_TESTS`.

While lines are recorded, of a test with several cases only the first runs, and its lines count for all.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Journal:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tests.jsonl"
        current = folder / "current"
        current.write_bytes(bytes(8))
        with current.open("r+b") as file:
            self.current = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
        self.index = 0
        self.num_cases: Counter[str] = Counter()

    def write(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.num_cases = Counter(function_of(item) for item in items)
        if "MUTANTS_LINES" in os.environ:
            items[:] = {function_of(item): item for item in reversed(items)}.values()
            items.reverse()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.index += 1
        self.current[0] = self.index
        start = time.time()
        self.write(index=self.index, test=function_of(item), cases=self.num_cases[function_of(item)], start=start)
        try:
            return (yield)
        finally:
            self.write(index=self.index, seconds=time.time() - start)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(index=self.index, failed=report.when, case=report.nodeid)


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.pop("MUTANTS_TESTS", "")  # not for the pytest that a test may start
    if folder:
        config.pluginmanager.register(Journal(Path(folder)))
