"""Reads a config from a TOML or YAML file. Layer: parallel; pure.

The only module that uses PyYAML, an optional dependency (``pip install "fsdp2[yaml]"``).
"""

import tomllib
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError

__all__ = ["as_field", "read_section"]


def read_section(path: str | PathLike[str], section: str | None) -> tuple[dict[str, Any], str]:
    """A section of the file, and its name for messages. If `section` is None: ``parallel``, or the whole file if that
    is missing.

    Raises:
        ArgumentError: the file is not TOML or YAML, or lacks the section.
    """
    path = Path(path)
    content = _parsed(path)
    if not isinstance(content, dict):
        raise ArgumentError(f"{path}: expected keys and values, got {type(content).__name__}")
    sections = [name for name, value in content.items() if isinstance(value, dict)]
    if section is None and "parallel" not in sections:
        return content, str(path)
    section = section or "parallel"
    if section not in sections:
        raise ArgumentError(f"{path}: has no section '{section}'; it has {', '.join(map(str, sections)) or 'none'}")
    return content[section], f"{path} [{section}]"


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ArgumentError(f"{path}: expected a file that ends in .toml, .yaml or .yml")
    parse, mistake = tomllib.loads, ValueError
    if suffix != ".toml":
        try:
            yaml = import_module("yaml")
        except ImportError as error:
            raise ArgumentError(
                f'{path}: reading YAML needs PyYAML: pip install "fsdp2[yaml]"; or write the keys into a .toml file'
            ) from error
        parse, mistake = yaml.safe_load, yaml.YAMLError
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (UnicodeError, mistake) as error:
        raise ArgumentError(f"{path}: is not {suffix[1:].upper()}: {error}") from error


def as_field(name: str, value: Any) -> Any:
    """Convert values that a file expresses differently."""
    if name == "blocks":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "reshard_after_forward" and value == "auto":
        return None
    return "no" if name == "mixed_precision" and value is False else value  # an unquoted `no` in YAML
