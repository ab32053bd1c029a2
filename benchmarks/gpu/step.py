"""How long does a step of a billion parameters take on one GPU, and what does sharding add? See README.md.

python benchmarks/gpu/step.py --group nothing                      # world of 8, collectives that move nothing
python benchmarks/gpu/step.py --group timed --bandwidth-gb 100     # ... that occupy their stream
python benchmarks/gpu/step.py --group nccl                         # world of 1, where torch's uses NCCL

Each variant runs in a process of its own, so that memory is its own; all of them `--rounds` times, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.gpu import measure
from benchmarks.gpu.groups import Wire, init_simulated, take_gpu, use_wire
from benchmarks.gpu.model import SHAPES, flops_per_token
from benchmarks.gpu.variants import VARIANTS, Trainer

RESULTS = Path(__file__).parent / "results"
MARK = "RESULT "  # before the JSON that a child prints
WARMUP = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=("nothing", "copy", "timed", "nccl"), default="nothing")
    parser.add_argument("--variants", default="floor,none,torch,fsdp2,fsdp2-flat")
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--vocab", type=int, default=0, help="another than the size has; logits take much memory")
    parser.add_argument("--ranks", type=int, default=8, help="that are simulated; 1 with nccl")
    parser.add_argument("--bandwidth-gb", type=float, default=100.0, help="a second and rank, with --group timed")
    parser.add_argument("--latency-us", type=float, default=20.0, help="of each collective, with --group timed")
    parser.add_argument("--steps", type=int, default=8, help="that are timed in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the script")
    parser.add_argument("--out", type=Path, help="default: results/step-GROUP.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_one(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One variant in this process, which must not have a process group."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    _join(options, device)
    try:
        shape = SHAPES[options.size]
        shape = replace(shape, vocab=options.vocab or shape.vocab)
        trainer = Trainer(VARIANTS[name], shape, device)
        for _ in range(WARMUP):
            trainer.step()
        if options.group == "nothing":
            use_wire(Wire(fills=False))  # from here on: what is left in memory is numbers, not garbage
        times = measure.time_steps(trainer, options.steps, device)
        memory = measure.memory_of(trainer.step, device)
        timeline = measure.timeline_of(trainer.step, device)
        tokens = shape.batch * shape.length
        step_s = statistics.median(times.steps)
        peak = measure.peak_flops(device)
        return {
            "variant": name,
            "step_s": times.steps,
            "forward_backward_s": times.forward_backward,
            "optimizer_s": times.optimizer,
            "tokens_per_s": tokens / step_s,
            "mfu": None if peak is None else tokens * flops_per_token(shape) / step_s / peak,
            "memory_bytes": memory,
            "timeline_s": measure.as_dict(timeline),
            "losses": [loss.item() for loss in trainer.losses],
            "about": common.provenance(device.type),
        }
    finally:
        dist.destroy_process_group()


def _join(options: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_num_threads(1)
    take_gpu()
    if options.group == "nccl":
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    bandwidth = options.bandwidth_gb * 1e9 if options.group == "timed" else None
    init_simulated(options.ranks, Wire(True, bandwidth, options.latency_us * 1e-6))


def run_all(options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every variant once a round, in a process of its own each time."""
    results: list[dict[str, Any]] = []
    for round_ in range(options.rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            command = [sys.executable, __file__, *_as_arguments(options), "--one", name]
            environment = {**os.environ, "PYTHONPATH": str(common.ROOT)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            if done.returncode or not lines:
                print(f"{name}: failed\n{done.stderr[-4000:]}", file=sys.stderr)
                results.append({"variant": name, "error": done.stderr[-4000:]})
                continue
            results.append(json.loads(lines[-1].removeprefix(MARK)))
            print(f"round {round_}, {name}: {statistics.median(results[-1]['step_s']) * 1e3:.1f} ms", flush=True)
    return results


def _as_arguments(options: argparse.Namespace) -> list[str]:
    names = ("group", "size", "vocab", "ranks", "bandwidth_gb", "latency_us", "steps", "device")
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def summary(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The table of README.md. Ratios are to `floor`, or `none`; where neither is there, to the first."""
    good = {name: [each for each in results if each["variant"] == name and "error" not in each] for name in names}
    base = next((name for name in ("floor", "none") if good.get(name)), names[0])
    header = ["variant", "step ms", "fwd+bwd ms", f"/ {base}", "tokens/s", "MFU", "peak GiB", "reserved GiB"]
    header += ["retries", "idle ms", "comm. ms", "exposed ms", "kernels"]
    rows = []
    for name in names:
        if not good[name]:
            rows.append([name, *["failed"] * (len(header) - 1)])
            continue
        step, passes = _median(good[name], "step_s"), _median(good[name], "forward_backward_s")
        ratio = passes / _median(good[base], "forward_backward_s") if good[base] else float("nan")
        last = good[name][-1]
        memory, line = last["memory_bytes"] or {}, last["timeline_s"] or {}
        row = [name, f"{step * 1e3:.1f}", f"{passes * 1e3:.1f}", f"{ratio:.3f}", f"{last['tokens_per_s']:.0f}"]
        row.append("-" if last["mfu"] is None else f"{last['mfu']:.3f}")
        row += [_scaled(memory, key, 2.0**-30, 2) for key in ("peak_allocated", "peak_reserved")]
        row.append(_scaled(memory, "num_alloc_retries", 1, 0))
        row += [_scaled(line, key, 1e3, 1) for key in ("idle", "communication", "exposed")]
        rows.append([*row, _scaled(line, "kernels", 1, 0)])
    return common.table(header, rows)


def _median(results: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(value for each in results for value in each[key])


def _scaled(values: dict[str, float], key: str, scale: float, digits: int) -> str:
    return f"{values[key] * scale:.{digits}f}" if key in values else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all variants; or one, as a child."""
    options = parse(arguments)
    if options.one:
        print(MARK + json.dumps(run_one(options, options.one)), flush=True)
        return
    names = options.variants.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"unknown variants {unknown}; known are {list(VARIANTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device cpu --size tiny is a dry run of this script")
    results = run_all(options, names)
    asked = {name: str(value) for name, value in vars(options).items() if name not in ("one", "out")}
    common.write_json(options.out or RESULTS / f"step-{options.group}.json", {"options": asked, "results": results})
    print(summary(results, names))
    if any("error" in each for each in results):
        raise SystemExit("some variants failed; see above")


if __name__ == "__main__":
    main()
