"""Every benchmark, one after the other, and then the figures.

python -m benchmarks.all --short              # a first look: minutes; writes below runs/benchmarks/
python -m benchmarks.all                      # the main runs of each, hours; writes raw data and figures
python -m benchmarks.all --only memory host_overhead
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common, figures

SHORT = common.ROOT / "runs" / "benchmarks"


@dataclass(frozen=True)
class Benchmark:
    """A program, its options in a full run (each a run of its own), and those of the short one.

    Attributes:
        program: below benchmarks/.
        full: command lines.
        short: command line; None if a short run of it says nothing.
        figure: the file that the short run leaves for `figures`, where the program does not choose it itself.
    """

    program: str
    full: tuple[str, ...]
    short: str | None = "--short"
    figure: str | None = None


BENCHMARKS = {
    "step_time": Benchmark(
        "step_time/main.py",
        (
            "--rounds 20 --warmup 3",
            "--rounds 12 --warmup 3 --dtype mixed",
            "--rounds 12 --warmup 3 --dtype bfloat16",
            "--rounds 12 --warmup 3 --shape deep",
            "--rounds 8 --warmup 2 --ranks 4",
            "--rounds 8 --warmup 2 --ranks 4 --dtype mixed",
            "--rounds 8 --warmup 2 --ranks 4 --shape deep",
        ),
    ),
    "host_overhead": Benchmark("host_overhead/main.py", ("--rounds 15",)),
    "memory": Benchmark("memory/main.py", ("", "--dtype mixed", "--ranks 4")),
    "world_size": Benchmark("world_size/main.py", ("",)),
    "collectives": Benchmark("collectives/main.py", ("--rounds 11 --warmup 2", "--rounds 7 --warmup 1 --ranks 4")),
    "optimizer_and_clip": Benchmark(
        "optimizer_and_clip/main.py",
        ("--rounds 20 --warmup 3", "--rounds 20 --warmup 3 --rows 512 --dim 256"),
        "--rounds 5 --warmup 2",
        "cpu_2ranks_300x64x64.json",
    ),
    "muon": Benchmark(
        "optimizer_and_clip/muon.py",
        ("--rounds 12", "--rounds 8 --layers 6 --dim 512"),
        "--rounds 3 --warmup 1",
        "muon_cpu_2ranks_4x256.json",
    ),
    "wire": Benchmark("wire/main.py", ("",), "--rounds 3 --warmup 1", "cpu_2ranks.json"),
    "weights": Benchmark("weights/main.py", ("",), "--rounds 3 --warmup 1", "cpu_2ranks.json"),
    "checkpoint": Benchmark(
        "checkpoint/main.py", ("--rounds 4",), "--rounds 1 --blocks 2 --dim 256", "cpu_2ranks.json"
    ),
    "offload": Benchmark("offload/main.py", ("--rounds 12 --dim 64",), "--rounds 2 --warmup 1 --dim 64"),
    "plan": Benchmark("plan/main.py", ("--of counts", "--of times"), "--of counts --short"),
    "planning": Benchmark("checkpoint/planning.py", ("",), None),
    "init": Benchmark("init/main.py", ("",), "--ranks 2 --paper 8 --dtypes fp32 --ways fsdp2 meta", "cpu_0.1B.json"),
}


def commands(name: str, options: argparse.Namespace) -> list[list[str]]:
    """What to run for one benchmark."""
    benchmark = BENCHMARKS[name]
    lines = benchmark.full
    if options.short:
        lines = () if benchmark.short is None else (benchmark.short,)
    program = [sys.executable, str(common.ROOT / "benchmarks" / benchmark.program)]
    out = ["--out", str(SHORT / name / benchmark.figure)] if options.short and benchmark.figure else []
    return [[*program, *shlex.split(line), *out] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rounds and sizes: a first look")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="BENCHMARK")
    parser.add_argument("--print", action="store_true", help="say what would be run, and do not")
    options = parser.parse_args()
    failed = []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for name in options.only:
        for command in commands(name, options):
            print(f"\n== {name}: {shlex.join(['python', *command[1:]])}\n", flush=True)
            if options.print:
                continue
            start = time.monotonic()
            failed += [name] if subprocess.run(command, env=environment, cwd=common.ROOT).returncode else []
            print(f"\n== {name}: {time.monotonic() - start:.0f} s", flush=True)
    if options.print:
        return
    for path in figures.draw(SHORT if options.short else None, SHORT / "figures" if options.short else figures.FOLDER):
        print(f"figure: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
