"""The source of the package as syntax trees, and the questions that `tests/system/test_house.py` asks of them.

Imports no torch. `ROOT` is the folder of the repository.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file of the package; `name` is dotted and without the package's own name (which stands for itself)."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def dotted(self) -> str:
        return "fsdp2" if self.name == "fsdp2" else f"fsdp2.{self.name}"

    @property
    def top(self) -> str:
        """The package below `fsdp2`, or the module, that it belongs to."""
        return self.name.split(".")[0]

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or "fsdp2"
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def imports(module: Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """(statement, dotted module, name or ""), with relative imports resolved."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module.dotted.split(".")
                if module.path.name != "__init__.py":
                    package.pop()
                package = package[: len(package) - node.level + 1]
                source = ".".join([*package, source] if source else package)
            for alias in node.names:
                yield node, source, alias.name


def own_imports(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, name of the module of this package)."""
    for node, source, name in imports(module):
        if source == "fsdp2" or source.startswith("fsdp2."):
            inner = source.removeprefix("fsdp2").removeprefix(".")
            candidate = f"{inner}.{name}".strip(".")
            yield node, candidate if candidate in modules() else (inner or "fsdp2")


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def torch_attributes(module: Module) -> Iterator[tuple[ast.Attribute, str]]:
    """Attribute chains that start at something imported from torch, as (node, dotted name in torch)."""
    bound = {}
    for node, source, name in imports(module):
        if source.split(".")[0] == "torch":
            assert isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names:
                if name in ("", alias.name):
                    target = f"{source}.{name}" if name else (source if alias.asname else "torch")
                    bound[alias.asname or (name or "torch")] = target
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            chain: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                chain.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                yield node, ".".join([bound[value.id], *reversed(chain)])


@cache
def names_defined_here() -> frozenset[str]:
    """Every name that the package itself gives to a method, an attribute or a variable, outside `_torch/`."""
    names = set()
    for module in modules().values():
        if module.top == "_torch":
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif is_set_on(node, "self", "cls"):
                names.add(node.attr)
    return frozenset(names)


def definitions(module: Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions and classes at any depth, with their path in the module."""

    def below(node: ast.AST, path: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                inner = f"{path}.{child.name}".lstrip(".")
                yield inner, child
                yield from below(child, inner)
            else:
                yield from below(child, path)

    return below(module.tree, "")


def num_lines(node: Function | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_docstring_lines(node: Function) -> int:
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def num_parameters(node: Function) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    stars = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return len([argument for argument in named if argument.arg not in ("self", "cls")]) + len(stars)


def is_set_on(node: ast.AST, *owners: str) -> TypeGuard[ast.Attribute]:
    """Whether this is the target of `owner.name = ...`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in owners
    )


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {item.name: item for item in node.body if isinstance(item, Function)}
