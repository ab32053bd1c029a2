"""The command ``python -m fsdp2.plan model.py:build --world 512 --gpu h100 --config run.toml``. Layer: plan."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError, FSDPError
from fsdp2.parallel import ParallelConfig
from fsdp2.plan.alternatives import compare
from fsdp2.plan.machine import MACHINES
from fsdp2.plan.rehearsal import predict
from fsdp2.plan.workload import Workload

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 if the plan fits, 1 if not. Exits with 2 for invalid input."""
    parser = argparse.ArgumentParser("python -m fsdp2.plan", description="Memory and time of a step, before it runs.")
    parser.add_argument("workload", metavar="FILE.py:NAME", help="a Workload, or a function that returns one")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--gpu", default="h100", choices=sorted(MACHINES), help="what each rank has (default h100)")
    parser.add_argument("--memory-gib", type=float, metavar="X", help="memory of the device, if it has another amount")
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML file for ParallelConfig.load")
    parser.add_argument("--only", action="store_true", help="no alternatives: one plan, fifteen times as fast")
    given = parser.parse_args(arguments)
    machine = MACHINES[given.gpu]
    if given.memory_gib is not None:
        machine = replace(machine, memory=int(given.memory_gib * 2**30))
    try:
        config = ParallelConfig.load(given.config) if given.config else ParallelConfig()
        about = _load(given.workload), config, machine, given.world
        comparison = None if given.only else compare(*about)
        plan = predict(*about) if comparison is None else comparison.asked
    except FSDPError as error:
        parser.error(str(error))
    print(plan, *([] if comparison is None else [comparison]), sep="\n\n")  # noqa: T201
    return 0 if plan.fits else 1


def _load(name: str) -> Workload:
    """The workload ``FILE.py:NAME``."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ArgumentError(f"expected FILE.py:NAME with an existing file, got {name!r}")
    sys.path.insert(0, str(Path(path).parent))
    module = importlib.import_module(Path(path).stem)
    found: Any = getattr(module, attribute, None)
    if callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, Workload):
        there = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise ArgumentError(
            f"{path}: '{attribute}' must be a Workload, or a function that returns one; there are {there}"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
