"""The folder of an example's run: what moves away before it starts, and what is forgotten."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.examples import EXAMPLES


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The examples' own, which are no package."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "train_lm"))
    pytest.importorskip("rich")
    import checkpoint
    import reporting
    import run_folder

    return checkpoint, reporting, run_folder


def test_a_run_goes_on_from_before_its_end(modules: Any, tmp_path: Path) -> None:
    """The loss had gone wrong. What was saved later stayed, and the next resume took that."""
    checkpoint, _, run_folder = modules
    for step in (20, 40, 60):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    saved = checkpoint.Saved(tmp_path / "checkpoints/step-00000020", 20, {}, {})
    run_folder.prepare_folder(tmp_path, saved)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"]
    assert len([*(tmp_path / "previous-1").iterdir()]) == 2


def test_numbers_of_earlier_runs(modules: Any, tmp_path: Path) -> None:
    """Somebody had deleted the first: there was one folder, so that the next was called like it, and no run began."""
    *_, run_folder = modules
    (tmp_path / "previous-2").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    run_folder.prepare_folder(tmp_path, None)
    assert [path.name for path in (tmp_path / "previous-3").iterdir()] == ["metrics.jsonl"]
