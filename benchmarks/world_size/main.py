"""What do `fully_shard` and the first step cost one rank, as the number of ranks grows? Results: README.md.

python benchmarks/world_size/main.py                                # 8 to 4096 ranks
python benchmarks/world_size/main.py --models tall --worlds 8 65536
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, fake
from benchmarks.memory.tracking import allocated

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
WIDTH = 16
VARIANTS = ["torch-fsdp2-true", "fsdp2-true"]
PHASES = ["mesh", "fully_shard", "first step", "second step"]
SHORT = {"worlds": [8, 512, 4096], "rounds": 2}
DRY_RUN = {"worlds": [8], "rounds": 1, "models": ["tall"]}


class Tall(nn.Module):
    """Four matrices of 8192 rows: enough for a row on each of 4096 ranks, so that nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8192, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + (x @ weight.T)[..., :WIDTH]
        return x


class Stack(nn.Module):
    """Eight units, `common.GPT`'s way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Tall() for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@dataclass(frozen=True)
class Case:
    """A model with units in `blocks`, and what it is fed."""

    description: str
    build: Callable[[], nn.Module]
    feed: Callable[[], torch.Tensor]


CASES = {
    "tall": Case("8 units of 4 matrices of 8192 x 16: nothing is padded", Stack, lambda: torch.randn(2, WIDTH)),
    "gpt": Case(
        "a GPT of 8 blocks of 12 parameters, width 256: from 256 ranks on, some have no row of some parameters",
        lambda: common.GPT(256, 16, 256, 4, 8),
        lambda: torch.randint(256, (1, 16)),
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096], help="ranks, of which one is run")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed, in a process of its own")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is run")
    common.add_size_options(parser)
    return common.apply_size_options(parser, SHORT, DRY_RUN)


# --- one measurement, in a process of its own -------------------------------------------------------------------------


def wrapped(model: str, variant: str) -> nn.Module:
    built: Any = CASES[model].build()
    return common.PEERS[variant].wrap(built, common.Workload())


def warm_up(variant: str) -> None:
    """What a process does once: imports that are made late, the first DTensor."""
    small: Any = Stack()
    small.blocks = small.blocks[:1]
    common.PEERS[variant].wrap(small, common.Workload())(torch.randn(2, WIDTH)).sum().backward()


def timed(model: str, variant: str, ranks: int) -> dict[str, dict[str, float]]:
    """Wall and processor seconds of each phase."""
    found: dict[str, dict[str, float]] = {"seconds": {}, "cpu_seconds": {}}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        found["seconds"][name] = time.perf_counter() - wall
        found["cpu_seconds"][name] = time.process_time() - cpu
        return result

    case, workload = CASES[model], common.Workload()
    phase("mesh", lambda: init_device_mesh("cpu", (ranks,)))
    warm_up(variant)
    built: Any = case.build()
    feed = case.feed()
    sharded = phase("fully_shard", lambda: common.PEERS[variant].wrap(built, workload))
    phase("first step", lambda: sharded(feed).sum().backward())
    sharded.zero_grad()
    phase("second step", lambda: sharded(feed).sum().backward())
    return found


def weighed(model: str, variant: str) -> dict[str, int]:
    """Bytes of tensors: the shards, and these with all that the first step takes at its peak."""
    warm_up(variant)
    sharded: Any = wrapped(model, variant)
    shards = sum(param.to_local().untyped_storage().nbytes() for param in sharded.parameters())
    feed = CASES[model].feed()
    return {"shards": shards, "first_step": shards + allocated(lambda: sharded(feed).sum().backward())}


def resident(model: str, variant: str) -> dict[str, int]:
    """Bytes of the process beyond what it had with the whole model, before `fully_shard`: most and last. What the model
    gives back serves again, so that only differences between numbers of ranks mean something."""
    warm_up(variant)
    built: Any = CASES[model].build()
    feed = CASES[model].feed()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    sharded = common.PEERS[variant].wrap(built, common.Workload())
    sharded(feed).sum().backward()
    return {"peak": _status("VmHWM") - before, "left": _status("VmRSS") - before}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One case for each model, variant and world. Times on a group whose collectives do nothing, memory on one that
    fills what it gathers."""
    keys = [(m, v, w) for m in options.models for v in options.variants for w in options.worlds]
    cases = {key: dict(zip(("model", "variant", "world"), key, strict=True)) | {"rounds": []} for key in keys}
    for (model, variant, world), case in cases.items():
        where = fake.FakeRank(options.rank, world)
        case["tensor_bytes"] = fake.in_fake_rank(where, weighed, model, variant)
        case["resident_bytes"] = fake.in_fake_rank(where, resident, model, variant)
    shuffled = random.Random(0)
    for _ in range(options.rounds):
        shuffled.shuffle(keys)
        for model, variant, world in keys:
            where = fake.FakeRank(options.rank, world, "silent")
            cases[model, variant, world]["rounds"].append(fake.in_fake_rank(where, timed, model, variant, world))
    return list(cases.values())


def report(cases: list[dict[str, Any]], clock: str) -> str:
    """The table of README.md."""
    rows = []
    for case in cases:
        row = [case["model"], case["variant"], str(case["world"])]
        for phase in PHASES:
            row.append(common.Spread.of([each[clock][phase] for each in case["rounds"]]).format(1, 1000))
        row += [f"{case['tensor_bytes'][key] / MIB:.1f}" for key in ("shards", "first_step")]
        row += [f"{case['resident_bytes'][key] / MIB:.1f}" for key in ("peak", "left")]
        rows.append(row)
    header = ["model", "variant", "ranks", *[f"{phase}, ms" for phase in PHASES]]
    return common.table([*header, "shards, MiB", "first step, MiB", "process: most", "left"], rows)


def main() -> None:
    options = parse()
    machine = fake.in_fake_rank(fake.FakeRank(0, 1), common.provenance, "cpu")
    result = {
        "question": "world size",
        "command": " ".join(["python", "benchmarks/world_size/main.py", *sys.argv[1:]]),
        **machine,
        "backend": list(fake.BACKENDS),
        "ranks": options.worlds,
        "rank": options.rank,
        "models": {name: CASES[name].description for name in options.models},
        "cases": measure(options),
    }
    path = common.out_path(options, RESULTS, "cpu_fake.json")
    common.write_json(path, result)
    print(f"Processor time:\n\n{report(result['cases'], 'cpu_seconds')}")
    print(f"\nWall time:\n\n{report(result['cases'], 'seconds')}\n\nraw data: {path}")


if __name__ == "__main__":
    main()
