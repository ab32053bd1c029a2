"""What a user sees of the package. (Type checkers: `make lint` checks tests/helpers/typed_program.py.)"""

import importlib.metadata
import os
from pathlib import Path

import pytest

import fsdp2
from fsdp2 import CheckpointError, checkpoint
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

LAZY = """
import sys, fsdp2
assert not [name for name in sys.modules if name.startswith(("fsdp2.checkpoint", "fsdp2.compat", "fsdp2.parallel"))]
assert "checkpoint" in dir(fsdp2) and "__version__" in dir(fsdp2)
print(fsdp2.checkpoint.save.__name__, fsdp2.init.materialize.__name__, fsdp2.parallel.parallelize.__name__,
      fsdp2.compat.install.__name__, fsdp2.events.record.__name__)
"""


def test_modules_are_loaded_when_they_are_used(tmp_path: Path) -> None:
    """After `import fsdp2` the documented `fsdp2.checkpoint.save` was an AttributeError."""
    script = tmp_path / "lazy.py"
    script.write_text(LAZY)
    done = run_script(script, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.output.split() == ["save", "materialize", "parallelize", "install", "record"], done.errors


def test_version() -> None:
    assert fsdp2.__version__ == importlib.metadata.version("fsdp2")
    with pytest.raises(AttributeError, match="module 'fsdp2' has no attribute 'fsdp'"):
        fsdp2.fsdp  # noqa: B018


def test_a_first_start_has_no_checkpoint(tmp_path: Path) -> None:
    """`load(latest(run))` died of "expected str, bytes or os.PathLike object, not NoneType"."""
    with pytest.raises(CheckpointError, match=r"no checkpoint: .*On a first start skip the load"):
        checkpoint.load(checkpoint.latest(tmp_path))  # type: ignore[arg-type]
