"""Copies of a commit in which mutants live, and runs of tests in them."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRACING = "tests/mutants/tracing"


@dataclass(frozen=True)
class Finished:
    """status: of pytest; None if it was still running after the time limit."""

    status: int | None
    seconds: float


class Interrupted(Exception):
    """The run had to make way; ask again."""


class Tree:
    """A copy, and the process (`warm.py`) in whose forks its tests run, started when it is needed.

    Args:
        root: where it is. `of_commit` makes it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._warm: subprocess.Popen[str] | None = None
        self._server = 0
        self._traced = ""

    @classmethod
    def of_commit(cls, commit: str, to: Path) -> Tree:
        """The files of a commit, with the tools that run mutants as they are here; undoes what a cut-off run left."""
        to.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x"], cwd=to, input=archive, check=True)
        shutil.copytree(Path(__file__).parent, to / "tests" / "mutants", dirs_exist_ok=True)
        return cls(to)

    def run_tests(
        self, journal: Path, arguments: list[str], timeout_s: float, traced: bool = False, pause: Path | None = None
    ) -> Finished:
        """Run pytest, and end all that it has started.

        Args:
            journal: the folder for its output, and for what `naming.py` and the recorder of lines write.

        Raises:
            Interrupted: `pause` exists.
        """
        if self._warm is None or self._traced != (str(journal) if traced else ""):
            self.close()
            self._start(journal if traced else None)
        job = {
            "output": str(journal / "output.txt"),
            "environment": {"MUTANTS_TESTS": str(journal)},
            "arguments": ["-q", "-p", "tests.mutants.naming", "-p", "no:cacheprovider", *arguments],
        }
        start = time.monotonic()
        assert self._warm is not None and self._warm.stdin is not None
        self._warm.stdin.write(json.dumps(job) + "\n")
        self._warm.stdin.flush()
        pid = self._answer()["pid"]
        status, interrupted = None, False
        while status is None and not interrupted and time.monotonic() - start < timeout_s:
            if select.select([self._warm.stdout], [], [], 0.2)[0]:
                status = self._answer()["status"]
            else:
                interrupted = pause is not None and pause.exists()
        _end_all(lambda parent, session: session == pid or parent == self._server)
        if status is None:
            self._answer()
        if interrupted:
            raise Interrupted
        return Finished(status, time.monotonic() - start)

    def close(self) -> None:
        if self._warm is not None:
            with self._warm:  # closes its pipes
                self._warm.kill()
            _end_all(lambda parent, session: parent == self._server)
            with suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGKILL)
            self._warm = None

    def _start(self, lines: Path | None) -> None:
        """Start the process; `lines` is the folder in which it and its children record lines."""
        environment = dict(os.environ, PYTHONPATH=str(self.root), OMP_NUM_THREADS="1", RES_OPTIONS="attempts:0")
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pytest keeps the modules whose asserts it has rewritten
        if lines is not None:
            environment["PYTHONPATH"] = f"{self.root / TRACING}:{self.root}"
            environment |= {"MUTANTS_LINES": str(lines), "MUTANTS_ROOT": str(self.root)}
            (lines / "current").write_bytes(bytes(8))
        self._traced = "" if lines is None else str(lines)
        self._warm = subprocess.Popen(
            [sys.executable, self.root / "tests/mutants/warm.py"],
            cwd=self.root,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._server = self._answer()["server"]

    def _answer(self) -> dict[str, Any]:
        assert self._warm is not None and self._warm.stdout is not None
        answer: dict[str, Any] = json.loads(self._warm.stdout.readline())
        return answer


def _end_all(is_meant: Any) -> None:
    """Kill the processes for whose parent and session `is_meant` says so."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if is_meant(int(fields[1]), int(fields[3])):
                os.kill(int(path.parent.name), signal.SIGKILL)
