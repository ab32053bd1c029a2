"""Numbers that may only go down: the calls of a step, the lines of the core, and its imports of what lies outside.

The calls are those of one of 64 plain units of eight parameters in a step on 8 ranks, 7 of which do not exist, beyond
those of the same model without sharding. They are counted, so the machine's noise does not matter. Write smaller
numbers here when you have made them smaller.
"""

import ast
import gc
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fsdp2
from benchmarks import fake
from benchmarks.host_overhead.cases import steps_of
from tests.helpers.parity_models import TORCH_VERSION
from tests.helpers.source_tree import Module, modules, own_imports

PACKAGE = Path(fsdp2.__file__).parent
NUM_UNITS = 64
COUNTED_ON = (2, 13)  # other versions of torch make other calls

MAX_PYTHON_CALLS = 112
MAX_C_CALLS = 146
# Of the Python calls: those of packages that a plain unit should not need.
MAX_CALLS_OF = {"watch": 6, "checks": 0, "extras": 0, "disk": 0}
MAX_CORE_LINES = 5_890
MAX_OF_A_CLASS = (300, 14, 40)
# (module of the core, module outside of it)
KNOWN_IMPORTS: list[tuple[str, str]] = []

Calls = tuple[Counter[str], int]


def calls_of_both() -> list[Calls]:
    """Those of the model without sharding, and with it."""
    rank = fake.FakeRank(0, 8, "silent")
    return [fake.in_fake_rank(rank, calls, name) for name in ("none", "fsdp2-true")]


def calls(variant: str) -> Calls:
    """The Python calls of one steady step by package, and the number of its C calls."""
    step = steps_of("tiny", [variant], "cpu")[variant]
    for _ in range(6):
        step()
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            found[path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else "elsewhere"] += 1
        elif event == "c_call":
            found["C"] += 1

    gc.collect()
    gc.disable()  # what it finds calls back, at any time
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    gc.enable()
    return found, found.pop("C")


@pytest.mark.skipif(TORCH_VERSION != COUNTED_ON, reason="counted on another version of torch")
def test_calls_of_a_unit_in_a_step() -> None:
    # In a process of its own: hooks and threads that other tests have left make calls too.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        (plain, plain_c), (ours, ours_c) = process.submit(calls_of_both).result()
    ours.subtract(plain)
    assert round(ours.total() / NUM_UNITS) <= MAX_PYTHON_CALLS
    assert round((ours_c - plain_c) / NUM_UNITS) <= MAX_C_CALLS
    for package, most in MAX_CALLS_OF.items():
        assert round(ours[package] / NUM_UNITS) <= most, package


def core() -> list[Module]:
    """The modules of the root, `runtime` and `comm`, and the private names of torch that they use."""
    folders = (PACKAGE, PACKAGE / "runtime", PACKAGE / "comm")
    found = [each for each in modules().values() if each.path.parent in folders and each.name != "fsdp2"]
    return [*found, modules()["_torch"]]


def test_lines_of_the_core() -> None:
    assert sum(module.path.read_text(encoding="utf-8").count("\n") for module in core()) <= MAX_CORE_LINES


def test_classes_of_the_core() -> None:
    """(lines, attributes, branches: `if`, `and`, `x if y`) of each, without exceptions."""
    for module in core():
        for each in [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]:
            nodes = [*ast.walk(each)]
            init = [node for node in each.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
            targets = [node for body in init for node in ast.walk(body) if isinstance(node, ast.Attribute)]
            ands = [node for node in nodes if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)]
            sizes = (
                (each.end_lineno or 0) - each.lineno + 1,
                len({node.attr for node in targets if isinstance(node.ctx, ast.Store)}),
                sum(isinstance(node, (ast.If, ast.IfExp)) for node in nodes) + sum(len(a.values) - 1 for a in ands),
            )
            assert all(size <= most for size, most in zip(sizes, MAX_OF_A_CLASS, strict=True)), (each.name, sizes)


def test_imports_of_the_core() -> None:
    inside = {module.name for module in core()}
    found = {(module.name, target) for module in core() for _, target in own_imports(module)}
    outside = sorted((name, target) for name, target in found if target not in inside)
    assert outside == KNOWN_IMPORTS
