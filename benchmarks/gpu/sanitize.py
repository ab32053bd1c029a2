"""Does torch's CUDA sanitizer find two streams that use one tensor without waiting? See README.md.

python benchmarks/gpu/sanitize.py

The sanitizer (`torch.cuda._sanitizer`, TORCH_CUDA_SANITIZER=1) follows every operator, event and allocation, and raises
where a read or write of memory is not ordered after the last write by another stream. It must be on before CUDA is
initialised, so the script starts itself again with it. A race of its own is made first, to see that it is found.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.gpu import delays, groups

RESULTS = Path(__file__).parent / "results"
VARIABLE = "TORCH_CUDA_SANITIZER"


def finds_a_race(device: torch.device) -> bool:
    """A tensor is written on one stream and read on another at once."""
    if device.type != "cuda":
        return False
    try:
        tensor = torch.zeros(1 << 20, device=device)
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.add_(1)
    except Exception as error:
        return type(error).__name__.startswith("CUDASanitizer")
    return False


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the rest is as for `delays`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="direct,packed,no reshard,replicas,microbatches,kept storage,lists")
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the script")
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer.json")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Train each setting; the sanitizer's complaints."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    report: dict[str, Any] = {"finds_a_race_of_its_own": finds_a_race(device), "complaints": {}}
    options.delay_ms = 0.0
    groups.init_simulated(8, groups.Wire())
    try:
        for name in options.settings.split(","):
            try:
                delays.train(delays.SETTINGS[name], None, options, device)
            except Exception:  # the sanitizer's, or one that it caused
                report["complaints"][name] = traceback.format_exc()[-6000:]
            print(f"{name}: {'complaint' if name in report['complaints'] else 'nothing found'}", flush=True)
        report["about"] = common.provenance(device.type)
    finally:
        dist.destroy_process_group()
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write, and fail if there are complaints."""
    options = parse(arguments)
    if options.device == "cuda" and os.environ.get(VARIABLE) != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, VARIABLE: "1"})
    report = check(options)
    common.write_json(options.out, report)
    if options.device == "cuda" and not report["finds_a_race_of_its_own"]:
        raise SystemExit("the sanitizer does not find a plain race here, so that it finds nothing says nothing")
    if report["complaints"]:
        raise SystemExit("\n".join(f"{name}:\n{text}" for name, text in report["complaints"].items()))


if __name__ == "__main__":
    main()
