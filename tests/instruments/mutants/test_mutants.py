"""`make mutants` puts in faults, finds them by the tests given, and takes them out again."""

from pathlib import Path

import pytest

from tests.instruments.mutants.__main__ import finds, sample

MODULE = """
def larger(one: int | None, other: int) -> int:
    '''The larger one.'''
    return one if one > other else other
"""
TESTS = """
from module import larger


def test_larger():
    assert [larger(1, 2), larger(2, 2), larger(3, 2)] == [2, 2, 3]
"""


@pytest.mark.exhaustive  # pytest starts several times
def test_faults_are_found_by_the_tests_given(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\n")
    changes = list(sample(tmp_path, ["module.py"], seed=0))
    assert changes and changes == list(sample(tmp_path, ["module.py"], seed=0))
    for change in changes:
        found = finds(change, ["test_module.py"], tmp_path, 60)
        assert ("test_larger" in found) is (change.operator.rpartition("_")[2] not in ("GtE", "IsNot")), change
    assert (tmp_path / "module.py").read_text() == MODULE
