"""What does `safety` cost the host? Two ranks on gloo, the same steps with it off, on, and within `agree_on_step`.

python benchmarks/host_overhead/safety.py                       # what docs/launching.md says
python benchmarks/host_overhead/safety.py --rounds 100 --out x.json

The variants take turns, in an order drawn anew each round; a round is some steps of each. Processor time, because a
step on two ranks waits for the other one: of the training thread, and of the whole process, where the watchdog counts.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from benchmarks.host_overhead.cases import WIDTH, Units

RESULTS = Path(__file__).parent / "results"
BASELINE = "off"
VARIANTS = (BASELINE, "on", "on, agree_on_step")
CLOCKS = {"thread_seconds": time.thread_time, "process_seconds": time.process_time}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=5, help="of each turn")
    parser.add_argument("--units", type=int, default=16, help="of 8 small parameters")
    common.add_size_options(parser)
    return common.apply_size_options(parser, {"rounds": 15}, {"rounds": 2, "steps": 1, "units": 2})


def step_of(num_units: int) -> Callable[[bool], None]:
    torch.manual_seed(0)
    model = Units(num_units, 4)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    feed = torch.randn(2, WIDTH)

    def step(joint: bool) -> None:
        with fsdp2.agree_on_step(model) if joint else nullcontext():
            model(feed).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Clock -> variant -> seconds a step, of each round."""
    step = step_of(options.units)
    found = {clock: {name: [] for name in VARIANTS} for clock in CLOCKS}
    order, draw = list(VARIANTS), random.Random(0)  # the same on all ranks
    for number in range(-2, options.rounds):
        draw.shuffle(order)
        for name in order:
            fsdp2.safety(name != BASELINE)
            dist.barrier()
            before = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(options.steps):
                step("agree" in name)
            for clock, read in CLOCKS.items():
                if number >= 0:
                    found[clock][name].append((read() - before[clock]) / options.steps)
    return found


def report(found: dict[str, dict[str, list[float]]], num_units: int) -> str:
    """Microseconds a unit, and ratios taken within each round."""
    rows = []
    for name in VARIANTS:
        row = [name]
        for seconds in found.values():
            row += [common.Spread.of(seconds[name]).format(0, 1e6 / num_units)]
            row += [common.ratios(seconds, name, BASELINE).format(3)]
        rows.append(row)
    header = ["safety", "training thread, µs a unit", "ratio", "process, µs a unit", "ratio"]
    return common.table(header, rows)


def main() -> None:
    options = parse()
    common.launch(__file__, 2)
    common.join("cpu")
    found = measure(options)
    if dist.get_rank() == 0:
        result = {
            "question": __doc__.splitlines()[0],
            "command": shlex.join(["python", "benchmarks/host_overhead/safety.py", *sys.argv[1:]]),
            **common.provenance("cpu"),
            "units": options.units,
            **found,
        }
        common.write_json(common.out_path(options, RESULTS, "safety_cpu_2ranks.json"), result)
        print(report(found, options.units))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
