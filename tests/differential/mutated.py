"""The body of a rank that imports one module of fsdp2 with a fault in it, and runs a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

# Nothing here imports fsdp2: `run_mutated` is called in a process that has not imported it.


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self.old, self.new = old, new

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        assert source.count(self.old) == 1, f"{self.path}: {source.count(self.old)} places fit, expected 1: {self.old}"
        return compile(source.replace(self.old, self.new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, module: str, old: str, new: str) -> None:
        self.module, self.old, self.new = module, old, new

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.module else None
        if spec is not None:
            assert spec.origin is not None
            spec.loader = _Loader(fullname, spec.origin, self.old, self.new)
        return spec


def run_mutated(rank: int, world_size: int, *, module: str, old: str, new: str, text: str, progress: str) -> Any:
    """Import `module` with `new` in place of `old`, and run a program."""
    assert module not in sys.modules, "only in a process that has not imported fsdp2"
    sys.meta_path.insert(0, _Finder(module, old, new))
    from tests.differential.interpret import run_program

    return run_program(rank, world_size, text=text, progress=progress)
