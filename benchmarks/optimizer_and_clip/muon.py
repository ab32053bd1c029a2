"""What does a step of Muon cost on sharded matrices? Results: README.md.

python benchmarks/optimizer_and_clip/muon.py                  # the table in README.md
python benchmarks/optimizer_and_clip/muon.py --peers FOLDER   # and PyPI's muon-fsdp2, installed there with pip --target
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from fsdp2 import fully_shard
from fsdp2.optim import MatrixOptimizer, matrix_optimizer

RESULTS = Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each variant before")
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads")
    parser.add_argument("--layers", type=int, default=4, help="of four matrices (dim, dim) and three (3 dim, dim)")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", type=Path, help="a folder with other packages")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    return parser.parse_args()


class Layer(nn.Module):
    """The matrices of a transformer's layer, each with a gradient of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        shapes = [(dim, dim)] * 4 + [(3 * dim, dim)] * 2 + [(dim, 3 * dim)]
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((weight * weight).sum() for weight in self.weights)


class Nothing(torch.optim.Optimizer):
    """Changes nothing: what is left of a step is communication and copies."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def trained(options: argparse.Namespace, shards: bool) -> list[nn.Parameter]:
    """Parameters with gradients, as a backward leaves them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(options.dim) for _ in range(options.layers))).to(options.device)
    if shards:
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model(torch.zeros((), device=options.device)).backward()
    params = list(model.parameters())
    params[0].model = model  # type: ignore[attr-defined]  # a unit lives as long as its module
    return params


def variants(options: argparse.Namespace) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name."""
    found: dict[str, torch.optim.Optimizer] = {
        "whole model on each rank": torch.optim.Muon(trained(options, shards=False), lr=1e-3),
        "torch.optim.Muon on DTensors": torch.optim.Muon(trained(options, shards=True), lr=1e-3),
        "matrix_optimizer": matrix_optimizer(torch.optim.Muon, trained(options, shards=True), lr=1e-3),
        "its communication": matrix_optimizer(Nothing, trained(options, shards=True)),
    }
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
        import muon_fsdp2

        group = {"params": trained(options, shards=True), "use_muon": True, "lr": 1e-3, "ns_steps": 5}
        found["muon-fsdp2 0.3.0"] = muon_fsdp2.Muon([group])
    return found


def facts(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Collectives of a step, and what the state takes on this rank."""
    with CommDebugMode() as seen:
        optimizer.step()
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    held = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)
    return {"collectives": seen.get_total_counts(), "state_bytes": held, "sent_bytes": bytes_sent(optimizer)}


def bytes_sent(optimizer: torch.optim.Optimizer) -> int:
    """By this rank in a step; 0 where it is not counted."""
    if not isinstance(optimizer, MatrixOptimizer):
        return 0
    return sum(bucket.num_bytes_sent for bucket in optimizer.buckets)


def bar(seconds: dict[str, list[float]], num_ranks: int) -> common.Spread:
    """The step, over the whole model's share of a rank and the communication, within each round."""
    columns = [seconds[name] for name in ("matrix_optimizer", "whole model on each rank", "its communication")]
    return common.Spread.of([own / (whole / num_ranks + sent) for own, whole, sent in zip(*columns, strict=True)])


def report(seconds: dict[str, list[float]], found: dict[str, dict[str, int]]) -> str:
    """The table of README.md."""
    rows = [
        [
            name,
            common.Spread.of(seconds[name]).format(1, 1000),
            common.ratios(seconds, name, "whole model on each rank").format(),
            str(found[name]["collectives"]),
            f"{found[name]['sent_bytes'] / 2**20:.1f}" if found[name]["sent_bytes"] else "",
            f"{found[name]['state_bytes'] / 2**20:.1f}",
        ]
        for name in seconds
    ]
    header = ["variant", "CPU, ms", "/ whole", "collectives", "sent by a rank, MiB", "state of a rank, MiB"]
    return common.table(header, rows)


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join(options.device, options.threads)
    chosen = variants(options)
    steps: dict[str, Callable[[], Any]] = {name: optimizer.step for name, optimizer in chosen.items()}
    for optimizer in chosen.values():
        optimizer.step()
    found = {name: facts(optimizer) for name, optimizer in chosen.items()}
    timings = common.interleave(steps, options.rounds, options.warmup, options.device)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        path = options.out or RESULTS / f"muon_{options.device}_{ranks}ranks_{options.layers}x{options.dim}.json"
        result = {
            "question": "a step of Muon",
            "command": " ".join(["python", "benchmarks/optimizer_and_clip/muon.py", *sys.argv[1:]]),
            **common.provenance(options.device),
            "workload": {key: getattr(options, key) for key in ("layers", "dim")},
            "rounds": options.rounds,
            "warmup": options.warmup,
            "facts": found,
            "seconds": timings.wall,
            "cpu_seconds": timings.cpu,
        }
        common.write_json(path, result)
        for name, seconds in (("Processor time of a rank", timings.cpu), ("Wall time of the slowest", timings.wall)):
            print(f"{name}:\n\n{report(seconds, found)}\n")
            print(f"matrix_optimizer / (whole / ranks + its communication): {bar(seconds, ranks).format()}\n")
        print(f"raw data: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
