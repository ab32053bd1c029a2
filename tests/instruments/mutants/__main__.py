"""Puts random faults into files of the library, one at a time, and says which of them tests find.

    make mutants ARGS="fsdp2/optim/clip.py --tests tests/optim/test_clip.py"
    make mutants ARGS="fsdp2/runtime --tests tests/core --count 100 --seed 7"

A fault is one change by an operator of cosmic-ray: another comparison, a number plus one, a loop that does not run. A
place is drawn first and one of its changes then. Annotations and docstrings are no code, and are left alone. The
faults live in a copy of the last commit below build/mutants, where the protective tests among those given run until
one fails.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.helpers.source_tree import ROOT


@dataclass(frozen=True)
class Change:
    """The `occurrence`-th place of a file where cosmic-ray's `operator` fits."""

    path: str
    operator: str
    occurrence: int

    def apply(self, source: str) -> str:
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        assert changed is not None
        return str(changed)


def sample(root: Path, paths: list[str], seed: int) -> Iterator[Change]:
    """Changes of code in random order, one for each place."""
    by_place: dict[Any, list[Change]] = defaultdict(list)
    for name in sorted(str(file.relative_to(root)) for path in paths for file in files_of(root / path)):
        tree = get_ast((root / name).read_text())
        for operator in sorted(operator_names()):
            kind = get_operator(operator)
            if kind.arguments() or operator.endswith("NoOp"):
                continue
            positions = (at for node in ast_nodes(tree) for at in kind().mutation_positions(node))
            for occurrence, at in enumerate(positions):
                by_place[name, at, operator.partition("_")[0]].append(Change(name, operator, occurrence))
    chance = random.Random(seed)
    for place in chance.sample(sorted(by_place), len(by_place)):
        change = chance.choice(by_place[place])
        source = (root / change.path).read_text()
        try:
            if code_of(change.apply(source)) != code_of(source):
                yield change
        except SyntaxError:
            pass  # such as the removal of half of `not in`


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def code_of(source: str) -> str:
    """What is executed: without annotations and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def difference(change: Change, source: str) -> str:
    after = change.apply(source)
    return "\n".join(difflib.unified_diff(source.splitlines(), after.splitlines(), change.path, n=0, lineterm=""))


def finds(change: Change, tests: list[str], tree: Path, timeout_s: float) -> str:
    """The first test that fails with the change; "" if all pass."""
    path = tree / change.path
    source = path.read_text()
    try:
        path.write_text(change.apply(source))
        return first_failure(tests, tree, timeout_s)
    finally:
        path.write_text(source)


def first_failure(tests: list[str], tree: Path, timeout_s: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tree, env=env, text=True, start_new_session=True, **pipes) as pytest:
        try:
            output, _ = pytest.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s:.0f} s"
        finally:
            if pytest.poll() is None:
                os.killpg(pytest.pid, signal.SIGKILL)
    if pytest.returncode == 0:
        return ""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [output[-200:]])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files and folders of the library")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a fault, at most")
    options = parser.parse_args()
    tree = ROOT / "build" / "mutants"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x"], cwd=tree, input=archive, check=True)
    without = first_failure(options.tests, tree, options.timeout)
    assert not without, f"without a fault: {without}"
    num_found = 0
    for index, change in zip(range(options.count), sample(tree, options.paths, options.seed), strict=False):
        start = time.monotonic()
        test = finds(change, options.tests, tree, options.timeout)
        num_found += bool(test)
        shown = f"found by {test}" if test else "NOT FOUND\n" + difference(change, (tree / change.path).read_text())
        print(f"{index} {change.path} {change.operator} ({time.monotonic() - start:.0f} s): {shown}", flush=True)
    print(f"{num_found} of {options.count} found")


if __name__ == "__main__":
    main()
