"""Which protective tests run a line: made once for a tree, by running the tier under `tracing/sitecustomize.py`.

Processes that tests start count too: pools of ranks, scripts, torchrun. What a module's fixture runs counts for the
test that comes first; as a mutant's tests run in one process, later tests of the module have the fixture as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.trees import Tree

# These look at the source, not at what it does, or start the tools that do; or they need what is not installed here.
NOT_ASKED = (
    "tests/clients/",
    "tests/gpu/",
    "tests/mutants/",
    "tests/system/test_docs.py",
    "tests/system/test_house.py",
    "tests/system/test_typing.py",
)
MODULES_AT_ONCE = 5
TRACED_S = 1500


@dataclass
class LineMap:
    """Tests are functions: all cases that the protective tier has of each.

    Attributes:
        tests: by node id, how many seconds its cases take.
        lines: by `file:line`, the node ids that run it; without what only imports run.
    """

    tests: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def of(self, path: str, first: int, last: int) -> set[str]:
        """The tests that run a line of a range."""
        return {test for line in range(first, last + 1) for test in self.lines.get(f"{path}:{line}", ())}

    def of_file(self, path: str) -> set[str]:
        return {test for place, tests in self.lines.items() if place.startswith(f"{path}:") for test in tests}


def batches(tree: Tree, folder: Path) -> list[list[str]]:
    """The modules of protective tests that are not in the map yet, a few at a time: starting pools takes seconds."""
    traced = {module for done in folder.glob("*/done") for module in done.read_text().split()}
    paths = (str(path.relative_to(tree.root)) for path in sorted((tree.root / "tests").rglob("test_*.py")))
    asked = [path for path in paths if not path.startswith(NOT_ASKED) and path not in traced]
    return [asked[start : start + MODULES_AT_ONCE] for start in range(0, len(asked), MODULES_AT_ONCE)]


def trace(tree: Tree, folder: Path, modules: list[str], pause: Path | None) -> None:
    """Run the protective tests of some modules, and keep what they say in `folder`.

    Raises:
        Interrupted: the run had to make way; ask again.
    """
    own = folder / modules[0].replace("/", ".")
    own.mkdir(parents=True, exist_ok=True)
    for old in own.iterdir():
        old.unlink()
    tree.run_tests(own, [*modules, "-m", "not exhaustive"], TRACED_S, traced=True, pause=pause)
    (own / "done").write_text("\n".join(modules))


def read(folder: Path) -> LineMap:
    found = LineMap()
    lines = defaultdict(set)
    # A module whose tests are all exhaustive leaves no names.
    for own in sorted(path.parent for path in folder.glob("*/tests.jsonl") if (path.parent / "done").exists()):
        names, cases = {}, {}
        for text in (own / "tests.jsonl").read_text().splitlines():
            record = json.loads(text)
            index = record["index"]
            if "test" in record:
                names[index], cases[index] = record["test"], record["cases"]
            elif "seconds" in record:
                found.tests[names[index]] = round(record["seconds"] * cases[index], 3)
        for path in own.glob("*.lines"):
            for text in path.read_text().splitlines():
                index, _, place = text.partition(" ")
                name, _, line = place.partition(" ")
                if line.isdigit() and int(index):  # not the last one of a process that was killed
                    lines[f"{name}:{line}"].add(names[int(index)])
    found.lines = {place: sorted(tests) for place, tests in lines.items()}
    return found
