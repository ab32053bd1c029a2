"""The command: ``python -m fsdp2.plan model.py:build --world 512 --gpu h100 --config run.toml``. Layer: plan."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp2.errors import ArgumentError, FSDPError
from fsdp2.parallel import ParallelConfig
from fsdp2.plan.alternatives import Comparison, compare
from fsdp2.plan.machine import MACHINES
from fsdp2.plan.rehearsal import predict
from fsdp2.plan.workload import Workload

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        prog="python -m fsdp2.plan", description="Memory and time of a step, before it runs."
    )
    result.add_argument("workload", metavar="FILE.py:NAME", help="a Workload, or a function that returns one")
    result.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    result.add_argument("--gpu", default="h100", choices=sorted(MACHINES), help="what each rank has (default h100)")
    result.add_argument("--memory-gib", type=float, metavar="X", help="memory of the device, if it has another amount")
    result.add_argument("--config", metavar="FILE", help="a TOML or YAML file for ParallelConfig.load")
    result.add_argument("--batch-size", type=int, metavar="N", help="sequences in a microbatch")
    result.add_argument("--microbatches", type=int, metavar="N", help="forwards before each optimizer step")
    result.add_argument("--rank", type=int, default=0, help="which rank is planned (default 0)")
    result.add_argument("--only", action="store_true", help="no alternatives: one plan, fifteen times as fast")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 if the plan fits, 1 if not, 2 for wrong input."""
    given = parser().parse_args(arguments)
    try:
        comparison = _compare(given)
    except FSDPError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{comparison.asked}" + ("" if given.only else f"\n\n{comparison}"))  # noqa: T201
    return 0 if comparison.asked.fits else 1


def _compare(given: argparse.Namespace) -> Comparison:
    workload = _load(given.workload)
    changed = {
        name: getattr(given, name) for name in ("batch_size", "microbatches") if getattr(given, name) is not None
    }
    workload = replace(workload, **changed)
    config = ParallelConfig.load(given.config) if given.config else ParallelConfig()
    machine = MACHINES[given.gpu]
    if given.memory_gib is not None:
        machine = replace(machine, memory=int(given.memory_gib * 2**30))
    if given.only or given.rank:
        plan = predict(workload, config, machine, given.world, given.rank)
        return Comparison(plan, [plan], [])
    return compare(workload, config, machine, given.world)


def _load(name: str) -> Workload:
    """The workload ``FILE.py:NAME``.

    Raises:
        ArgumentError: there is no such file or name, or it is something else.
    """
    path, _, attribute = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise ArgumentError(f"expected FILE.py:NAME with an existing file, got {name!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
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
