"""Random mutants: cosmic-ray's operators on the runtime, `comm`, `optim` and the native path of checkpoints.

A place is chosen first and one of its mutations then, so that a comparison, which can be changed in nine ways, is not
chosen nine times as often. Annotations and docstrings are no code, and are left alone.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# What saving and loading our own folders runs; not other projects' formats, URLs or the tools.
TARGETS = (
    "fsdp2/runtime/*.py",
    "fsdp2/checks/*.py",
    "fsdp2/comm/*.py",
    "fsdp2/optim/*.py",
    "fsdp2/checkpoint/*.py",
    "fsdp2/checkpoint/run/*.py",
    "fsdp2/checkpoint/state/*.py",
    "fsdp2/checkpoint/io/*.py",
    "fsdp2/checkpoint/ranks/*.py",
    "fsdp2/checkpoint/schema/*.py",
    "fsdp2/checkpoint/storage/*.py",
    "fsdp2/checkpoint/formats/native.py",
)
LEFT_OUT = ("fsdp2/checkpoint/storage/remote.py", "fsdp2/checkpoint/scattering.py", "fsdp2/checkpoint/__main__.py")


@dataclass(frozen=True)
class Mutant:
    """One change: the `occurrence`-th place of a file where cosmic-ray's `operator` fits. Lines are counted from 1."""

    path: str
    operator: str
    occurrence: int
    line: int
    last_line: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    def apply(self, source: str) -> str:
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        assert changed is not None, f"{self.name}: no such place"
        return str(changed)


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, in random order: the first n of a larger sample are a sample of n."""
    by_place = _by_place(root)
    places = sorted(by_place)
    chance = random.Random(seed)
    chance.shuffle(places)
    chosen: list[Mutant] = []
    for place in places:
        mutants = by_place[place]
        mutant = mutants[chance.randrange(len(mutants))]
        if _changes_code(mutant, (root / mutant.path).read_text()):
            chosen.append(mutant)
        if len(chosen) == count:
            break
    return chosen


def _by_place(root: Path) -> dict[tuple[str, Any, Any, str], list[Mutant]]:
    found = defaultdict(list)
    for path in sorted({path for pattern in TARGETS for path in root.glob(pattern)}):
        name = str(path.relative_to(root))
        if name in LEFT_OUT:
            continue
        tree = get_ast(path.read_text())
        for operator_name in sorted(operator_names()):
            operator_class = get_operator(operator_name)
            if operator_class.arguments() or operator_name.endswith("NoOp"):
                continue
            operator = operator_class()
            positions = (at for node in ast_nodes(tree) for at in operator.mutation_positions(node))
            for occurrence, (start, end) in enumerate(positions):
                kind = operator_name.partition("_")[0]  # such as core/ReplaceComparisonOperator
                mutant = Mutant(name, operator_name, occurrence, start[0], end[0])
                found[name, start, end, kind].append(mutant)
    return dict(found)


def _changes_code(mutant: Mutant, source: str) -> bool:
    try:
        return _code(mutant.apply(source)) != _code(source)
    except SyntaxError:
        return False  # such as the removal of half of `not in`


def _code(source: str) -> str:
    """What is executed: without annotations, which nothing evaluates, and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)
