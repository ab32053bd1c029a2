"""Puts a mutant to the tests that run its lines: protective ones first, and exhaustive ones if these pass."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mapping import LineMap
from tests.mutants.sampling import Mutant
from tests.mutants.trees import Finished, Tree

STAGES = ("some", "more", "exhaustive")  # the fastest protective tests, the other protective ones, exhaustive ones
SECONDS = {"some": 40.0, "more": 400.0}  # what the tests of a stage took when the map was made
TEST_TIMEOUT_S = 60  # a protective test takes a third of that at most

# What `make test-all` adds for the runtime as a whole.
EXHAUSTIVE_OF_THE_RUNTIME = ("tests/differential/test_differential.py", "tests/races/test_programs.py")


@dataclass(frozen=True)
class Verdict:
    """What a stage says of a mutant. found: a test fails or hangs, named by `by`. complete: all its tests have run."""

    found: bool
    by: str
    num_tests: int
    complete: bool
    seconds: float


def judge(
    mutant: Mutant | None, stage: str, tests: list[str], tree: Tree, journal: Path, timeout_s: float, pause: Path | None
) -> Verdict:
    """Run `tests` with a mutant, or with none, until one fails.

    Raises:
        Interrupted: the run had to make way; ask again.
    """
    if not tests:
        return Verdict(False, "", 0, True, 0.0)
    journal.mkdir(parents=True, exist_ok=True)
    (journal / "tests.jsonl").unlink(missing_ok=True)
    (journal / "arguments.txt").write_text("\n".join(tests))
    arguments = ["-x", f"@{journal}/arguments.txt", "-m"]
    arguments += ["exhaustive"] if stage == "exhaustive" else ["not exhaustive", f"--timeout={TEST_TIMEOUT_S}"]
    with _applied(mutant, tree):
        finished = tree.run_tests(journal, arguments, timeout_s, pause=pause)
    return _verdict(finished, journal, stage)


def chosen_tests(mutant: Mutant, stage: str, lines: LineMap) -> list[str]:
    if stage == "exhaustive":
        return _exhaustive_modules(mutant, lines)
    some = _protective_tests(mutant, lines, SECONDS["some"])
    if stage == "some":
        return some
    return [test for test in _protective_tests(mutant, lines, SECONDS["more"]) if test not in set(some)]


def _protective_tests(mutant: Mutant, lines: LineMap, most_s: float) -> list[str]:
    """Tests that run the mutant's lines, or its file if only imports run these: the fastest of each module, then the
    second fastest of each, until they take `most_s`."""
    at = lines.of(mutant.path, mutant.line, mutant.last_line) or lines.of_file(mutant.path)
    ranked = []
    for tests in _by_module(at).values():
        in_order = sorted(tests, key=lambda test: (lines.tests.get(test, 0.0), test))
        ranked += [(position, lines.tests.get(test, 0.0), test) for position, test in enumerate(in_order)]
    chosen, total_s = [], 0.0
    for _, seconds, test in sorted(ranked):
        total_s += seconds
        if chosen and total_s > most_s:
            break
        chosen.append(test)
    return chosen


def _exhaustive_modules(mutant: Mutant, lines: LineMap) -> list[str]:
    """Modules whose protective tests run the mutant's lines or its file, those first in which most of them do."""
    num_tests = {module: len(tests) for module, tests in _by_module(lines.tests).items()}
    share: dict[str, float] = defaultdict(float)
    at, around = lines.of(mutant.path, mutant.line, mutant.last_line), lines.of_file(mutant.path)
    for tests, weight in ((at, 1.0), (around, 0.01)):
        for module, found in _by_module(tests).items():
            share[module] += weight * len(found) / num_tests[module]
    ranked = sorted(share, key=lambda module: (-share[module], module))
    for_all = EXHAUSTIVE_OF_THE_RUNTIME if mutant.path.startswith(("fsdp2/runtime", "fsdp2/comm")) else ()
    return list(dict.fromkeys([*ranked[:3], *for_all, *ranked]))


@contextmanager
def _applied(mutant: Mutant | None, tree: Tree) -> Iterator[None]:
    if mutant is None:
        yield
        return
    path = tree.root / mutant.path
    source, times = path.read_text(), path.stat()
    try:
        path.write_text(mutant.apply(source))
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled module is valid again


def _verdict(finished: Finished, journal: Path, stage: str) -> Verdict:
    last, start, failed, num_ended = "collection", time.time(), "", 0
    path = journal / "tests.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(text)
        if "test" in record:
            last, start = record["test"], record["start"]
        num_ended += "seconds" in record
        failed = record.get("case", failed)
    seconds = round(finished.seconds, 1)
    if finished.status is None:
        hangs = stage != "exhaustive" and time.time() - start > TEST_TIMEOUT_S  # and pytest-timeout could not end it
        return Verdict(hangs, f"{last} (hangs)" if hangs else "", num_ended, False, seconds)
    if finished.status in (0, 5):  # all passed; there is none
        return Verdict(False, "", num_ended, True, seconds)
    timed_out = "Timeout (>" in (journal / "output.txt").read_text(errors="replace")
    return Verdict(True, f"{failed or last}{' (hangs)' if timed_out else ''}", num_ended, False, seconds)


def _by_module(tests: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        found[test.partition("::")[0]].append(test)
    return found
