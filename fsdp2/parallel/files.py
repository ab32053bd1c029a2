"""Reading a config from a TOML or YAML file: its section, and the names of its keys. Layer: parallel; pure.

The only file that uses PyYAML, which is an optional dependency (``pip install "fsdp2[yaml]"``).
"""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["fields_from", "read_section"]

SECTIONS = ("parallel", "parallelism_config", "parallelism")  # ours, Accelerate's, torchtitan's

# Other names of fields: Accelerate's, also with the prefix that its YAML files have; Axolotl's; torchtitan's.
ALIASES = {
    "dp_replicate_size": "replicate",
    "dp_shard_size": "shard",
    "tp_size": "tensor",
    "cp_size": "context",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "sequence_parallel_degree": "context",
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
}
_PREFIX = "parallelism_config_"
_NOT_HERE = ("sp_size", "expert_parallel_size", "expert_parallel_degree")  # degrees of theirs that we do not have


def read_section(path: str | PathLike[str], section: str | None) -> tuple[dict[str, Any], str]:
    """A section of the file, and its name for messages.

    Args:
        path: ends in .toml, .yaml or .yml.
        section: its name. None: the one of `SECTIONS` that exists, or the whole file if none does.

    Raises:
        ArgumentError: the file cannot be read, or has no such section, or several of `SECTIONS`.
    """
    path = Path(path)
    content = _parsed(path)
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise ArgumentError(f"{path}: expected keys and values, got {kind}")
    sections = [name for name, value in content.items() if isinstance(value, dict)]
    if section is None:
        there = [name for name in SECTIONS if name in sections]
        if len(there) > 1:
            raise ArgumentError(f"{path}: has the sections {there}; keep one, or say which with section=")
        if not there:
            return content, str(path)
        section = there[0]
    if section not in sections:
        raise ArgumentError(f"{path}: has no section '{section}'; it has {', '.join(map(str, sections)) or 'none'}")
    return content[section], f"{path} [{section}]"


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ArgumentError(f"{path}: expected a file that ends in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            return tomllib.loads(text)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{path}: is not {suffix[1:].upper()}: {error}") from error
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ArgumentError(
            f'{path}: reading YAML needs PyYAML: pip install "fsdp2[yaml]", or write the same keys into a .toml file'
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path}: is not YAML: {error}") from error


def fields_from(values: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """The values under the names of our fields, in the form that the dataclass takes.

    Args:
        values: as read from a file. None counts as absent.
        names: of the fields.
        source: the beginning of messages.

    Raises:
        ArgumentError: a key is probably one of ours, misspelt; or two keys give one field different values.
        UnsupportedError: a key asks for a kind of parallelism that we do not have.

    A warning names all other keys.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, Any] = {}
    not_read: list[str] = []
    for key, value in values.items():
        name = str(key).removeprefix(_PREFIX)
        name = ALIASES.get(name, name)
        if name in _NOT_HERE:
            if value not in (None, 1):
                raise UnsupportedError(f"{source}: {key} = {value!r} asks for what there is not here. Set it to 1.")
        elif name not in names:
            if near := get_close_matches(name, [*names, *ALIASES], n=1, cutoff=0.8):
                raise ArgumentError(
                    f"{source}: unknown key '{key}' (did you mean '{near[0]}'?). The keys are {', '.join(names)}"
                )
            not_read.append(str(key))
        elif value is not None:
            value = _as_field(name, value)
            if found.setdefault(name, value) != value:
                raise ArgumentError(
                    f"{source}: {spelled[name]} = {found[name]!r} and {key} = {value!r} both give '{name}'; keep one"
                )
            spelled[name] = key
    if not_read:
        warnings.warn(
            f"{source}: not read, since they are no keys of ParallelConfig: {', '.join(not_read)}", stacklevel=4
        )
    return found


def _as_field(name: str, value: Any) -> Any:
    """Convert values that files can only express in another way."""
    if name == "blocks":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "reshard_after_forward" and value == "auto":
        return None
    if name == "shard" and value == -1:
        return "auto"
    return "no" if name == "mixed_precision" and value is False else value  # an unquoted `no` in YAML
