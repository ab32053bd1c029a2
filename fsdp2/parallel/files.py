"""Reading a section of a TOML or YAML file. Layer: parallel; pure.

The only file that uses PyYAML, which is an optional dependency (``pip install "fsdp2[yaml]"``).
"""

import tomllib
from collections.abc import Callable
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError
from fsdp2.parallel.keys import SECTIONS

__all__ = ["read_section"]


def read_section(path: str | PathLike[str], section: str | None) -> tuple[dict[str, Any], str]:
    """A section of the file, and its name for messages.

    Args:
        path: ends in .toml, .yaml or .yml.
        section: its name. None: the one of `SECTIONS` that exists, or the whole file if none does.

    Raises:
        ArgumentError: the file cannot be read, or has no such section, or several of `SECTIONS`.
    """
    path = Path(path)
    content = _read(path)
    if section is None:
        there = [name for name in SECTIONS if isinstance(content.get(name), dict)]
        if len(there) > 1:
            raise ArgumentError(f"{path}: has the sections {there}; keep one, or say which with section=")
        if not there:
            return content, str(path)
        section = there[0]
    values = content.get(section)
    if not isinstance(values, dict):
        sections = [name for name, value in content.items() if isinstance(value, dict)]
        raise ArgumentError(f"{path}: has no section '{section}'; it has {', '.join(map(str, sections)) or 'none'}")
    return values, f"{path} [{section}]"


def _read(path: Path) -> dict[str, Any]:
    parsers: dict[str, Callable[[Path, str], Any]] = {".toml": _parse_toml, ".yaml": _parse_yaml, ".yml": _parse_yaml}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ArgumentError(f"{path}: expected a file that ends in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: is not UTF-8 text: {error}") from error
    content = parse(path, text)
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise ArgumentError(f"{path}: expected keys and values, got {kind}")
    return content


def _parse_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{path}: is not TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ArgumentError(
            f'{path}: reading YAML needs PyYAML: pip install "fsdp2[yaml]" (or pip install pyyaml), or write the same '
            "keys into a .toml file"
        ) from error
    try:
        _reject_repeated_keys(path, yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path}: is not YAML: {error}") from error


def _reject_repeated_keys(path: Path, node: Any) -> None:
    """PyYAML uses the last one; TOML forbids repeated keys."""
    if node is None or node.id != "mapping":
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id == "scalar" and key.value in seen and key.value != "<<":
            raise ArgumentError(f"{path}: '{key.value}' stands twice, on lines {seen[key.value]} and {line}; keep one")
        seen[str(key.value)] = line
        _reject_repeated_keys(path, value)
