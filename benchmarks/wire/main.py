"""What do the narrow dtypes on the wire save, and what do they cost? Results: README.md.

python benchmarks/wire/main.py                   # the tables in README.md
python benchmarks/wire/main.py --rounds 5 --dim 128
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from fsdp2.extras.int8 import DEFAULT_BLOCK, dequantise, quantise
from fsdp2.extras.narrow import sum_rows

RESULTS = Path(__file__).parent / "results"
BASELINE = "fp32"
BF16 = torch.bfloat16
POLICIES = {
    BASELINE: {},
    "bf16 sum": {"reduce_dtype": BF16},
    "bf16 wire": {"reduce_scatter_dtype": BF16},
    "int8 gather": {"all_gather_dtype": torch.int8},
    "int8 gather, bf16 wire": {"all_gather_dtype": torch.int8, "reduce_scatter_dtype": BF16},
    "bf16 compute": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "bf16 compute, int8, bf16 wire": {
        "param_dtype": BF16,
        "reduce_dtype": torch.float32,
        "all_gather_dtype": torch.int8,
        "reduce_scatter_dtype": BF16,
    },
}


def parse() -> argparse.Namespace:
    defaults = common.Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each variant before")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    for field in ("blocks", "dim", "heads", "vocab", "batch", "length"):
        parser.add_argument(f"--{field}", type=int, default=getattr(defaults, field))
    return parser.parse_args()


def wrap_with(policy: dict[str, Any]) -> Callable[[common.GPT, common.Workload], nn.Module]:
    def wrap(model: common.GPT, workload: common.Workload) -> nn.Module:
        options = {"mp_policy": fsdp2.MixedPrecisionPolicy(**policy), "reshard_after_forward": True}
        for block in model.blocks:
            fsdp2.fully_shard(block, **options)
        fsdp2.fully_shard(model, **options)
        return model

    return wrap


def sent_by_a_rank(trainer: common.Trainer) -> dict[str, float]:
    """MiB that leave a rank in one step, from the events: of a gather's output and of a reduction's input each of n
    ranks sends ``(n - 1) / n``, its own part to all others or the others' parts to them."""
    with fsdp2.events.record() as log:
        trainer.step()
    sent = {"all_gather": 0.0, "reduce_scatter": 0.0}
    for event in log:
        if event.kind in sent:
            whole = event.nbytes * (event.group_size if event.kind == "reduce_scatter" else 1)
            sent[event.kind] += whole * (event.group_size - 1) / event.group_size / 2**20
    return sent


# --- errors -----------------------------------------------------------------------------------------------------------


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the value, in fp64."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


def errors_of_sums(num_ranks: int, numel: int = 1 << 16) -> dict[str, float]:
    """Of the mean of `num_ranks` gradients, summed in rank order as `GlooComm` does. Each is a common normal vector and
    normal noise of the same size."""
    generator = torch.Generator().manual_seed(0)
    everyone = torch.randn(numel, generator=generator) + torch.randn(num_ranks, numel, generator=generator)
    exact = everyone.double().mean(0)
    found = {}
    for name, wire, total in [
        ("fp32", torch.float32, torch.float32),
        ("bf16 wire", BF16, torch.float32),
        ("bf16 sum", BF16, BF16),
    ]:
        output = torch.empty(numel, dtype=total)
        sum_rows(list(everyone.to(wire)), output)
        found[name] = relative(output / num_ranks, exact)
    return found


def errors_of_parameters(numel: int = 1 << 16) -> dict[str, dict[str, float]]:
    """Of one all-gather, by the distribution of the parameters."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    outliers = normal * torch.where(torch.rand(numel, generator=generator) < 1e-3, 30.0, 1.0)
    uniform = torch.rand(numel, generator=generator) * 2 - 1
    found = {}
    for name, values in {"normal": normal, "uniform": uniform, "normal, 1 in 1000 times 30": outliers}.items():
        q = torch.empty(numel)
        dequantise(*quantise(values), DEFAULT_BLOCK, q)
        found[name] = {"bf16": relative(values.to(BF16), values.double()), "int8": relative(q, values.double())}
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    names = common.Workload.__dataclass_fields__
    workload = common.Workload(**{name: getattr(options, name) for name in names if name in options})
    trainers = {
        name: common.Trainer(common.Peer(name, wrap_with(policy)), workload) for name, policy in POLICIES.items()
    }
    sent = {name: sent_by_a_rank(trainer) for name, trainer in trainers.items()}
    steps = {name: trainer.step for name, trainer in trainers.items()}
    timings = common.interleave(steps, options.rounds, options.warmup, "cpu")
    losses = {}
    for name, trainer in trainers.items():
        mean = torch.stack(trainer.losses).double()
        dist.all_reduce(mean)
        losses[name] = (mean / dist.get_world_size()).tolist()
    result = {
        "question": "narrow dtypes on the wire",
        "command": " ".join(["python", "benchmarks/wire/main.py", *sys.argv[1:]]),
        **common.provenance("cpu"),
        "workload": asdict(workload),
        "num_parameters": sum(parameter.numel() for parameter in workload.model().parameters()),
        "rounds": options.rounds,
        "warmup": options.warmup,
        "mib_sent_by_a_rank": sent,
        "errors_of_sums": {str(ranks): errors_of_sums(ranks) for ranks in (2, 4, 8, 16, 64)},
        "errors_of_parameters": errors_of_parameters(),
        "seconds": timings.wall,
        "cpu_seconds": timings.cpu,
        "losses": losses,
    }
    if dist.get_rank() == 0:
        path = options.out or RESULTS / f"cpu_{dist.get_world_size()}ranks.json"
        common.write_json(path, result)
        report(result)
        print(f"raw data: {path}")


def report(result: dict[str, Any]) -> None:
    """The tables of README.md."""
    wall, cpu, rows = result["seconds"], result["cpu_seconds"], []
    base = result["losses"][BASELINE]
    for name in wall:
        sent, losses = result["mib_sent_by_a_rank"][name], result["losses"][name]
        row = [name, f"{sent['all_gather']:.1f}", f"{sent['reduce_scatter']:.1f}"]
        row += [common.Spread.of(wall[name]).format(0, 1000), common.ratios(wall, name, BASELINE).format()]
        row += [common.ratios(cpu, name, BASELINE).format()]
        rows.append([*row, f"{max(abs(a - b) for a, b in zip(losses, base, strict=True)):.1e}"])
    header = ["variant", "gathers, MiB", "reductions, MiB", "step, ms", f"/ {BASELINE}, wall", "CPU", "loss differs by"]
    print(common.table(header, rows), end="\n\n")
    sums = result["errors_of_sums"]
    kinds = list(next(iter(sums.values())))
    print(common.table(["ranks", *kinds], [[n, *(f"{each[kind]:.1e}" for kind in kinds)] for n, each in sums.items()]))
    params = result["errors_of_parameters"]
    print()
    print(
        common.table(
            ["parameters", "bf16", "int8"], [[n, *(f"{e:.1e}" for e in v.values())] for n, v in params.items()]
        )
    )


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    measure(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
