"""The body of a rank that imports one module of fsdp2 with a fault in it, and runs a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

# Nothing here imports fsdp2: `run_mutated` is called in a process that has not imported it.
Changes = Sequence[tuple[str, str]]


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Changes) -> None:
        super().__init__(name, path)
        self.changes = changes

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for old, new in self.changes:
            assert source.count(old) == 1, f"{self.path}: {source.count(old)} places fit, expected 1: {old}"
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, module: str, changes: Changes) -> None:
        self.module, self.changes = module, changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.module else None
        if spec is not None:
            assert spec.origin is not None
            spec.loader = _Loader(fullname, spec.origin, self.changes)
        return spec


def run_mutated(rank: int, world_size: int, *, module: str, changes: Changes, text: str, progress: str) -> Any:
    """Import `module` with the changes, old and new text, and run a program."""
    assert module not in sys.modules, "only in a process that has not imported fsdp2"
    sys.meta_path.insert(0, _Finder(module, changes))
    from tests.differential.interpret import run_program

    return run_program(rank, world_size, text=text, progress=progress)
