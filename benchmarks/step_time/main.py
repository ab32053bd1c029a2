"""How long does a training step take, and how much of it is sharding? Results: README.md.

python benchmarks/step_time/main.py                                      # the table in README.md
python benchmarks/step_time/main.py --ranks 4 --rounds 10 --dtype mixed
python benchmarks/step_time/main.py --shape deep                         # more and smaller blocks
python benchmarks/step_time/main.py --profile fsdp2-true                 # where the time of one variant goes
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common

RESULTS = Path(__file__).parent / "results"
PROFILED_STEPS = 10
# As many parameters in large blocks and in small ones: 8 of 3.2 million each, 32 of 0.8 million.
SHAPES: dict[str, dict[str, int]] = {"wide": {}, "deep": {"blocks": 32, "dim": 256, "heads": 4}}
SHORT = {"rounds": 7, "warmup": 2}
DRY_RUN = {"rounds": 1, "warmup": 1, "blocks": 2, "dim": 32, "heads": 2, "batch": 1, "length": 16}


def parse() -> argparse.Namespace:
    defaults = common.Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each variant before")
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads")
    parser.add_argument("--variants", nargs="+", choices=common.PEERS, default=list(common.PEERS), metavar="VARIANT")
    parser.add_argument("--baseline", choices=common.PEERS, default="torch-fsdp2-true", metavar="VARIANT")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "mixed"], default=defaults.dtype)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=defaults.device)
    parser.add_argument("--shape", choices=SHAPES, default="wide", help="other defaults for what follows")
    for field in ("blocks", "dim", "heads", "vocab", "batch", "length"):
        parser.add_argument(f"--{field}", type=int, default=getattr(defaults, field))
    parser.add_argument("--profile", choices=common.PEERS, metavar="VARIANT", help="profile this one instead; rank 0")
    common.add_size_options(parser)
    shape = SHAPES[parser.parse_known_args()[0].shape]
    parser.set_defaults(**shape)
    options = common.apply_size_options(parser, SHORT, DRY_RUN)
    if options.profile is None and options.baseline not in options.variants:
        parser.error(
            f"the baseline {options.baseline} is not among the variants: name it, or choose one with --baseline"
        )
    return options


def workload_of(options: argparse.Namespace) -> common.Workload:
    names = common.Workload.__dataclass_fields__
    return common.Workload(**{name: getattr(options, name) for name in names})


def check_losses(trainers: dict[str, common.Trainer]) -> dict[str, list[float]]:
    """Every variant's losses, averaged over ranks; a benchmark of a wrong result would be worthless."""
    losses = {}
    for name, trainer in trainers.items():
        mean = torch.stack(trainer.losses).double()
        dist.all_reduce(mean)
        losses[name] = (mean / dist.get_world_size()).tolist()
    return losses


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Between any two variants that average gradients, over all steps."""
    averaging = [values for name, values in losses.items() if common.PEERS[name].averages]
    return max((max(step) - min(step) for step in zip(*averaging, strict=True)), default=0.0)


def measure(options: argparse.Namespace) -> None:
    workload = workload_of(options)
    trainers = {name: common.Trainer(common.PEERS[name], workload) for name in options.variants}
    steps = {name: trainer.step for name, trainer in trainers.items()}
    timings = common.interleave(steps, options.rounds, options.warmup, options.device)
    losses = check_losses(trainers)
    result = {
        "question": "training step",
        "command": " ".join(["python", "benchmarks/step_time/main.py", *sys.argv[1:]]),
        **common.provenance(options.device),
        "workload": asdict(workload),
        "num_parameters": sum(parameter.numel() for parameter in workload.model().parameters()),
        "rounds": options.rounds,
        "warmup": options.warmup,
        "baseline": options.baseline,
        "largest_loss_difference": largest_difference(losses),
        "summary": summary(timings.wall, options.baseline),
        "cpu_summary": summary(timings.cpu, options.baseline),
        "seconds": timings.wall,
        "cpu_seconds": timings.cpu,
        "losses": losses,
    }
    if dist.get_rank() == 0:
        shape = "" if options.shape == "wide" else f"_{options.shape}"
        name = f"{options.device}_{dist.get_world_size()}ranks_{options.dtype}{shape}.json"
        path = common.out_path(options, RESULTS, name)
        common.write_json(path, result)
        print(f"Wall time of the slowest rank:\n\n{report(timings.wall, options.baseline)}\n")
        print(f"Processor time of a rank:\n\n{report(timings.cpu, options.baseline)}")
        print(f"\nlargest difference in loss between variants that average: {result['largest_loss_difference']:.1e}")
        print(f"raw data: {path}")


def summary(seconds: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in seconds:
        rows[name] = {
            "seconds": asdict(common.Spread.of(seconds[name])),
            "of_baseline": asdict(common.ratios(seconds, name, baseline)),
        }
        if "none" in seconds and baseline != "none":
            rows[name]["of_none"] = asdict(common.ratios(seconds, name, "none"))
            rows[name]["overhead_of_baselines"] = asdict(common.overheads(seconds, name, baseline, "none"))
        if "ddp" in seconds:
            rows[name]["of_ddp"] = asdict(common.ratios(seconds, name, "ddp"))
    return rows


def report(seconds: dict[str, list[float]], baseline: str) -> str:
    """The table of README.md: medians, and the quartiles in brackets."""
    header = ["variant", "step, ms", f"/ {baseline}"]
    floor = "none" in seconds and baseline != "none"
    header += ["/ none", "overhead / baseline's"] if floor else []
    header += ["/ ddp"] if "ddp" in seconds else []
    rows = []
    for name in seconds:
        row = [name, common.Spread.of(seconds[name]).format(0, 1000), common.ratios(seconds, name, baseline).format()]
        if floor:
            row.append(common.ratios(seconds, name, "none").format())
            row.append(common.overheads(seconds, name, baseline, "none").format())
        if "ddp" in seconds:
            row.append(common.ratios(seconds, name, "ddp").format())
        rows.append(row)
    return common.table(header, rows)


def profile(options: argparse.Namespace) -> None:
    """Write rank 0's top tables of one variant: Python by own and by cumulative time, and torch's operators."""
    trainer = common.Trainer(common.PEERS[options.profile], workload_of(options))
    for _ in range(options.warmup):
        trainer.step()
    python = cProfile.Profile()
    dist.barrier()
    python.enable()
    for _ in range(PROFILED_STEPS):
        trainer.step()
    python.disable()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    dist.barrier()
    with torch.profiler.profile(activities=activities) as operators:
        for _ in range(PROFILED_STEPS):
            trainer.step()
    if dist.get_rank() == 0:
        path = options.out or RESULTS / f"profile_{options.profile}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        for order in ("tottime", "cumulative"):
            pstats.Stats(python, stream=text).strip_dirs().sort_stats(order).print_stats(45)
        text.write(
            operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=60)
        )
        path.write_text(f"{options.profile}: {PROFILED_STEPS} steps on rank 0\n\n{text.getvalue()}", encoding="utf-8")
        print(f"profile: {path}")


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join(options.device, options.threads)
    (profile if options.profile else measure)(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
