"""Imported by Python at startup if this folder is on ``PYTHONPATH``: with ``FSDP2_COMPAT=1`` it installs compat as soon
as torch has been imported. Layer: compat.

It costs nothing in processes that do not import torch. If it fails, ``import torch`` fails too, because a program must
not run on another implementation than requested.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__: list[str] = []

_HERE = Path(__file__).resolve().parent


class _AfterTorch(MetaPathFinder):
    """Finds torch through the other finders, and extends its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """torch's own spec, with a loader that installs afterwards; None for all other modules."""
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_install(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _install()

            loader.exec_module = load_and_install
        return spec


def _install() -> None:
    sys.path.append(str(_HERE.parents[2]))  # the parent process may have found fsdp2 next to itself
    importlib.import_module("fsdp2.compat.auto")


def _run_shadowed() -> None:
    """Run the `sitecustomize` that Python would have imported otherwise."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _HERE])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("FSDP2_COMPAT") == "1":
    sys.meta_path.insert(0, _AfterTorch())
_run_shadowed()
