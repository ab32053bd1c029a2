"""What does it cost to publish a model of many small tensors? Results: README.md.

python benchmarks/weights/main.py                  # the table in README.md
python benchmarks/weights/main.py --rounds 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from fsdp2 import events

RESULTS = Path(__file__).parent / "results"
LOOP = "full_tensor() of each, then cast"
BF16 = torch.bfloat16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    return parser.parse_args()


def ways(model: nn.Module) -> dict[str, Callable[[], None]]:
    """Whole tensors in 16 bits on every rank, one way and the other."""

    def loop() -> None:
        for param in model.parameters():
            assert isinstance(param, DTensor)
            param.detach().full_tensor().to(BF16)

    def over(plan: fsdp2.transfer.Weights) -> Callable[[], None]:
        def publish() -> None:
            for _ in plan:
                pass

        return publish

    return {
        LOOP: loop,
        "fsdp2.weights": over(fsdp2.weights(model)),
        "fsdp2.weights, bf16 on the wire": over(fsdp2.weights(model, dtype=BF16)),
    }


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    model = nn.Sequential(*(nn.Linear(options.dim, options.dim, bias=False) for _ in range(options.tensors)))
    for layer in model:
        fsdp2.fully_shard(layer)
    steps = ways(fsdp2.fully_shard(model))
    sent = {}
    for name, step in steps.items():
        with events.record() as log:
            step()
        sent[name] = sum(event.nbytes for event in log if event.kind == "weights")
    sent[LOOP] = sum(param.numel() * param.element_size() for param in model.parameters())
    timings = common.interleave(steps, options.rounds, options.warmup, "cpu")
    if dist.get_rank() == 0:
        path = options.out or RESULTS / f"cpu_{dist.get_world_size()}ranks.json"
        command = " ".join(["python", "benchmarks/weights/main.py", *sys.argv[1:]])
        sizes = {"tensors": options.tensors, "dim": options.dim}
        measured = {"bytes": sent, "seconds": timings.wall, "cpu_seconds": timings.cpu}
        common.write_json(path, {"command": command, **common.provenance("cpu"), **sizes, **measured})
        rows = [
            [
                name,
                common.Spread.of(timings.wall[name]).format(1, 1000),
                common.ratios(timings.wall, name, LOOP).format(),
                common.ratios(timings.cpu, name, LOOP).format(),
                f"{sent[name] / sent[LOOP]:.2f}",
            ]
            for name in steps
        ]
        print(common.table(["way", "ms", "/ loop, wall", "/ loop, CPU", "bytes / loop"], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
