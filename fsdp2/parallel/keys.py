"""The keys that a config may have, by our names and by those of other tools. Layer: parallel; pure."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["ALIASES", "SECTIONS", "fields_from"]

# Sections that hold nothing but such keys: ours, Accelerate's, torchtitan's.
SECTIONS = ("parallel", "parallelism_config", "parallelism")

# Other names of fields.
ALIASES = {
    # Accelerate's ParallelismConfig, also with the prefix that its YAML files put before each
    "dp_replicate_size": "replicate",
    "dp_shard_size": "shard",
    "tp_size": "tensor",
    "cp_size": "context",
    # Axolotl (the names of data parallelism are Accelerate's)
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "sequence_parallel_degree": "context",
    # torchtitan
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
}
_PREFIX = "parallelism_config_"

# How Accelerate moves keys and values, and with what code; here that is always a ring of our own, with equal results.
_WITHOUT_EFFECT = ("cp_comm_strategy", "cp_backend")

# Keys of the same tools for what we do not have: accepted as long as they ask for nothing.
_NOT_HERE = {
    "sp_size": "sequence parallelism in the manner of Ulysses; context = n splits sequences too",
    "expert_parallel_size": "expert parallelism; give experts a mesh of their own with shard_placement_fn",
    "expert_parallel_degree": "expert parallelism; give experts a mesh of their own with shard_placement_fn",
}

_MOST_UNKNOWN = 5  # that a message lists; the whole file of another tool may have a hundred


def fields_from(values: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """The values under the names of our fields, as the dataclass wants them.

    Args:
        values: as read from a file. None counts as absent.
        names: of the fields.
        source: what messages begin with.

    Raises:
        ArgumentError: a key is unknown, or two keys give one field two values.
        UnsupportedError: a key asks for something that we do not have.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unknown = []
    for key, value in values.items():
        name = str(key).removeprefix(_PREFIX)
        name = ALIASES.get(name, name)
        if name in _NOT_HERE:
            if value not in (None, 1):
                raise UnsupportedError(f"{source}: {key} = {value!r} asks for {_NOT_HERE[name]}. Set it to 1.")
        elif name not in names and name not in _WITHOUT_EFFECT:
            unknown.append(str(key))
        elif value is not None and name in names:
            value = _as_field(name, value)
            if name in found and found[name] != value:
                raise ArgumentError(
                    f"{source}: {spelled[name]} = {found[name]!r} and {key} = {value!r} both give '{name}'; keep one"
                )
            found[name], spelled[name] = value, str(key)
    if unknown:
        raise ArgumentError(_unknown(unknown, names, source))
    return found


def _as_field(name: str, value: Any) -> Any:
    """What files can say only in another way."""
    if name == "blocks":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "reshard_after_forward" and value == "auto":
        return None
    if name == "shard" and value == -1:
        return "auto"
    if name == "mixed_precision" and value is False:  # an unquoted `no` in YAML
        return "no"
    return value


def _unknown(keys: Sequence[str], names: Sequence[str], source: str) -> str:
    spellings = [*names, *ALIASES, *(_PREFIX + alias for alias in ALIASES)]
    words = []
    for key in keys[:_MOST_UNKNOWN]:
        near = get_close_matches(key, spellings, n=1)
        words.append(f"'{key}'" + (f" (did you mean '{near[0]}'?)" if near else ""))
    if len(keys) > _MOST_UNKNOWN:
        words.append(f"and {len(keys) - _MOST_UNKNOWN} more")
    return (
        f"{source}: unknown key{'s' * (len(keys) > 1)} {', '.join(words)}. The keys are {', '.join(names)}. "
        "Keys of other programs may stay in the file if ours are in a section 'parallel' of their own."
    )
