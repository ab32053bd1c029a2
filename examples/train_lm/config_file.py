"""Options of `train_lm.py` from a file, and the parallelism that file and command line choose together.

Imported by `options.py`. The file is TOML:

    [parallel]        # keys of fsdp2.parallel.ParallelConfig
    tensor = 2
    [train]           # options of train_lm.py, without the dashes in front; "-" or "_" inside
    global-batch-size = 32

What is on the command line wins over the file.
"""

from __future__ import annotations

import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime import UsageError

from fsdp2 import ArgumentError
from fsdp2.parallel import ParallelConfig

# Options that exclude each other: one on the command line takes the place of the other in the file.
PARTNERS = {"batch_size": "global_batch_size", "resume": "auto_resume"}
PARTNERS |= {other: one for one, other in PARTNERS.items()}


def read_tables(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables [parallel] and [train]; there may be no others."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    unknown = [name for name in content if name not in ("parallel", "train")]
    if unknown:
        raise UsageError(f"--config {path}: unknown {', '.join(unknown)}; it has the tables [parallel] and [train]")
    return content.get("parallel", {}), content.get("train", {})


def as_arguments(table: Mapping[str, Any], flags: Mapping[str, bool], given: Sequence[str], path: Path) -> list[str]:
    """The table [train] as words of a command line.

    Args:
        table: keys and values.
        flags: the options that there are; True for those without a value.
        given: the words of the real command line.
        path: for messages.
    """
    words: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        option = f"--{name.replace('_', '-')}"
        if name not in flags:
            raise UsageError(f"--config {path} [train]: unknown key {key!r}; the keys are {', '.join(sorted(flags))}")
        if flags[name] != isinstance(value, bool):
            wanted = "true or false" if flags[name] else "a value"
            raise UsageError(f"--config {path} [train]: {key} wants {wanted}, got {value!r}")
        partner = f"--{PARTNERS.get(name, '').replace('_', '-')}"
        if any(word.split("=")[0] == partner for word in given):
            continue
        if isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not False:
            words.append(option if value is True else f"{option}={value}")
    return words


def parallel_config(values: Namespace, from_file: Mapping[str, Any], world_size: int) -> ParallelConfig:
    """The file's keys, those of the short options in their place, those of `--parallel` in theirs; checked against the
    world. Raises UsageError."""
    keys = dict(from_file)
    if values.hsdp is not None:
        keys["replicate"] = values.hsdp
    if values.reshard_after_forward != "auto":
        keys["reshard_after_forward"] = values.reshard_after_forward
    if values.bf16:
        keys["mixed_precision"] = "bf16"
    if values.offload is not None:
        keys["offload"] = values.offload
    if values.offload_tier is not None:
        keys["offload_tier"] = values.offload_tier
    if values.activation_checkpointing:
        keys["activation_checkpointing"] = "full"
    for text in values.parallel:
        key, found, value = text.partition("=")
        if not found:
            raise UsageError(f"--parallel takes KEY=VALUE, got {text!r}")
        words: dict[str, Any] = {"true": True, "false": False}
        keys[key] = words[value] if value in words else int(value) if value.isdigit() else value
    where = f"--config {values.config} [parallel]" if from_file else "--parallel"
    try:
        config = ParallelConfig.from_mapping(keys, source=where).resolve(world_size)
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    if config.shard == 1 and config.context == 1 and "reshard_after_forward" not in from_file:
        config = replace(config, reshard_after_forward=None)  # replicas alone: nothing is gathered
    if config.pipeline > 1:
        raise UsageError("train_lm.py has no pipeline stages: see examples/pipeline.py and examples/parallel.py")
    if values.seq_len % (2 * config.context) and config.context > 1:
        raise UsageError(
            f"--seq-len {values.seq_len} must be a multiple of {2 * config.context}: twice the context degree"
        )
    return config
