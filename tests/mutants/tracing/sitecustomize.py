"""Python imports this at startup if this folder is on `PYTHONPATH`. With `MUTANTS_LINES` in the environment each
process, thread and fork records which lines of the package it runs, for which test. See `tests/mutants/mapping.py`.

A line is written when a process first runs it for a test, so that a process that is killed loses nothing.
"""

import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

CO_OPTIMIZED = 1  # set for functions, not for the bodies of modules and classes


class _Recorder:
    """Writes `index file line` into `<pid>.lines`; `index` is that of the running test, 0 for what only imports run."""

    def __init__(self, folder: str, root: str) -> None:
        self.folder, self.root = folder, root
        with open(os.path.join(folder, "current"), "r+b") as file:
            self.current = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
        self.names: dict[str, str] = {}
        self.reopen()

    def reopen(self) -> None:
        self.file = os.open(os.path.join(self.folder, f"{os.getpid()}.lines"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.index = -1
        self.seen: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        name = self.names.get(code.co_filename)
        if name is None:
            name = self.names[code.co_filename] = self.name_of(code)
        return self.line if name else None

    def name_of(self, code: CodeType) -> str:
        path = os.path.relpath(code.co_filename, self.root) if code.co_filename.startswith("/") else ""
        return path if path.startswith("fsdp2/") else ""

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self.line
        code = frame.f_code
        index = self.current[0] if code.co_flags & CO_OPTIMIZED else 0
        if index and index != self.index:
            self.index, self.seen = index, set()
        key = (code.co_filename, frame.f_lineno if index else -frame.f_lineno)
        if key not in self.seen:
            self.seen.add(key)
            os.write(self.file, f"{index} {self.names[code.co_filename]} {frame.f_lineno}\n".encode())
        return self.line


if "MUTANTS_LINES" in os.environ:
    _recorder = _Recorder(os.environ["MUTANTS_LINES"], os.environ["MUTANTS_ROOT"])
    os.register_at_fork(after_in_child=_recorder.reopen)
    threading.settrace(_recorder.trace)
    sys.settrace(_recorder.trace)
