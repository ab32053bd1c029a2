"""Run Python in a process of its own, in which nothing is imported yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.source_tree import ROOT


def python(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with fsdp2 importable."""
    inherited = {name: value for name, value in os.environ.items() if name != "FSDP2_COMPAT"}
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=inherited | env,
        capture_output=True,
        text=True,
        timeout=170,
    )


def succeeds(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a process printed that must not fail."""
    done = python(*arguments, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
