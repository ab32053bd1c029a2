"""Processes that fork while checkpoints are saved, or before they are loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint import saving
from tests.helpers.source_tree import ROOT

FORKED = """
import os, sys, torch
from fsdp2 import checkpoint
torch.set_num_threads(16)
torch.get_num_threads()  # now the main thread has asked, and does not ask again when it is forked
failed = 0
for _ in range(20):
    if not (child := os.fork()):
        checkpoint.load(sys.argv[1], model={"w": torch.empty(1 << 12, 1 << 10, dtype=torch.float64)}, cast=True)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed)
"""


@pytest.mark.exhaustive
def test_ranks_that_were_forked(tmp_path: Path) -> None:
    """About one load of four hundred that goes through buffers (columns, another dtype) failed with "Invalid thread
    pool!" where a launcher had forked; with sixteen threads, nearly every one (see `workers.py`)."""
    checkpoint.save(tmp_path / "a", model={"w": torch.ones(1 << 12, 1 << 10)})
    command = [sys.executable, "-c", FORKED, tmp_path / "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_forked_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader, which saves what it has seen, waited for its parent's save: for a thread that is not
    in its process."""
    begun, go_on = threading.Event(), threading.Event()
    real = saving.write_file

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(saving, "write_file", slow)
    pending = checkpoint.save(tmp_path / "parent", model={"a": torch.ones(4)}, async_op=True)
    assert begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of threads
        child = os.fork()
    if not child:
        signal.alarm(30)
        code = 1
        try:
            go_on.set()  # the child's own
            checkpoint.save(tmp_path / "child", model={"a": torch.zeros(4)})
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    go_on.set()
    pending.wait()
    assert status == 0
    for name, value in (("parent", 1.0), ("child", 0.0)):
        into = {"a": torch.full((4,), 7.0)}
        checkpoint.load(tmp_path / name, model=into)
        assert into["a"].tolist() == [value] * 4
