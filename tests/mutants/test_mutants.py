"""`make mutants` puts in faults, finds them by the tests that run their lines, and takes them out again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mutants.__main__ import Results
from tests.mutants.judging import Verdict, chosen_tests, judge
from tests.mutants.mapping import batches, read, trace
from tests.mutants.sampling import Mutant, sample
from tests.mutants.trees import ROOT, Tree

PACKAGE = """
def larger(one: int | None, other: int) -> int:
    '''The larger one.'''
    if one is None:
        return other
    return one if one > other else other


def unused(x: int) -> int:
    return x + 1
"""
TESTS = """
import pytest
from fsdp2.optim.pair import larger, unused


@pytest.mark.parametrize("one", [1, 2, 3])
def test_larger(one):
    assert larger(one, 2) == max(one, 2)


@pytest.mark.exhaustive
def test_unused():
    assert unused(1) == 2
"""


@pytest.fixture
def small(tmp_path: Path) -> Tree:
    """A repository of one module, and two tests of it."""
    for name, text in {
        "fsdp2/__init__.py": "",
        "fsdp2/optim/__init__.py": "",
        "fsdp2/optim/pair.py": PACKAGE,
        "tests/__init__.py": "",
        "tests/optim/__init__.py": "",
        "tests/optim/test_pair.py": TESTS,
        "pytest.ini": "[pytest]\nmarkers = exhaustive\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for path in sorted((ROOT / "tests/mutants").rglob("*.py")):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    return Tree(tmp_path)


def test_a_sample_is_random_and_changes_code(small: Tree) -> None:
    mutants = sample(small.root, 100, seed=0)
    assert sample(small.root, 3, seed=0) == mutants[:3]
    assert len({(mutant.line, mutant.operator) for mutant in mutants}) == len(mutants)
    assert {mutant.line for mutant in mutants} == {4, 6, 10}, "neither annotations nor docstrings"
    assert sample(small.root, 100, seed=1) != mutants


@pytest.mark.exhaustive  # pytest starts five times
def test_mutants_are_judged_by_the_tests_that_run_their_lines(small: Tree, tmp_path: Path) -> None:
    folder = tmp_path / "map"
    assert batches(small, folder) == [["tests/optim/test_pair.py"]]
    try:
        trace(small, folder, ["tests/optim/test_pair.py"], pause=None)
        assert batches(small, folder) == []
        lines = read(folder)
        test = "tests/optim/test_pair.py::test_larger"
        assert lines.lines["fsdp2/optim/pair.py:6"] == [test] and "fsdp2/optim/pair.py:10" not in lines.lines
        assert lines.tests.keys() == {test}

        less = Mutant("fsdp2/optim/pair.py", "core/ReplaceComparisonOperator_Gt_Lt", 0, 6, 6)
        verdict = judge(less, "some", chosen_tests(less, "some", lines), small, tmp_path / "less", 60, None)
        assert (verdict.found, verdict.num_tests, verdict.by) == (True, 1, f"{test}[1]")
        same = Mutant("fsdp2/optim/pair.py", "core/ReplaceComparisonOperator_Gt_GtE", 0, 6, 6)
        verdict = judge(same, "some", chosen_tests(same, "some", lines), small, tmp_path / "same", 60, None)
        assert (verdict.found, verdict.num_tests, verdict.complete) == (False, 3, True)
        unused = Mutant("fsdp2/optim/pair.py", "core/ReplaceBinaryOperator_Add_Sub", 0, 10, 10)
        assert chosen_tests(unused, "some", lines) == [test], "nothing runs the line: those that run the file"
        for stage, found in (("some", False), ("exhaustive", True)):
            tests = chosen_tests(unused, stage, lines)
            assert judge(unused, stage, tests, small, tmp_path / stage, 60, None).found == found
    finally:
        small.close()
    assert (small.root / "fsdp2/optim/pair.py").read_text() == PACKAGE


def test_results_are_counted_by_stage(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    mutant = Mutant("fsdp2/optim/pair.py", "core/AddNot", 0, 4, 4)
    results.add(0, mutant, "some", Verdict(True, "a", 1, False, 1.0), "")
    for stage, found in (("some", False), ("more", False), ("exhaustive", True)):
        results.add(1, mutant, stage, Verdict(found, "b" * found, 1, True, 1.0), "")
    results.add(2, mutant, "some", Verdict(False, "", 1, True, 1.0), "")
    again = Results(results.path)
    assert not again.wants(0, "more") and not again.wants(1, "more") and again.wants(2, "more")
    assert again.summary() == results.summary()
    assert "found by the protective tests 1, by all tests 2" in again.summary() and "50.0 %" in again.summary()
    assert json.loads(results.path.read_text().splitlines()[0])["found"]
