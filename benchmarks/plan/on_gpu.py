"""Plans of the steps that ran on a GPU (`benchmarks/gpu/results`), as rank 0 of 8 whose collectives take no time.
See README.md.

python -m benchmarks.plan.on_gpu
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.gpu.model import SHAPES, Llama, Shape, loss_of
from fsdp2.parallel import ParallelConfig
from fsdp2.plan import MACHINES, Plan, Workload, predict

MACHINE = replace(MACHINES["h200"], link=1e30, network=1e30, link_latency=0.0, network_latency=0.0)
RESULTS = Path(__file__).parents[1] / "gpu" / "results"
RUNS = {"step-nothing": 32768, "step-nothing-vocab-4096": 4096}


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model(tokens[:, :-1]), tokens[:, 1:])


def planned(shape: Shape) -> Plan:
    workload = Workload(
        lambda: Llama(shape),  # recomputes its blocks itself
        lambda size: torch.zeros(size, shape.length + 1, dtype=torch.long),
        loss,
        lambda params: torch.optim.AdamW(params, fused=True),
        batch_size=shape.batch,
    )
    return predict(workload, ParallelConfig(mixed_precision="bf16"), MACHINE, world_size=8)


def rows_of(name: str, vocab: int) -> list[list[str]]:
    results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    found = next(each for each in results if each["variant"] == "fsdp2")
    plan = planned(replace(SHAPES["1b"], vocab=vocab))
    step, peak = statistics.median(found["step_s"]), found["memory_bytes"]["peak_allocated"]
    counted = plan.peak.total  # without what the allocator does not count
    return [
        [f"vocabulary {vocab}: step, ms", *compared(step * 1e3, plan.seconds * 1e3, 0)],
        [f"vocabulary {vocab}: peak, GiB", *compared(peak / 2**30, counted / 2**30, 2)],
    ]


def compared(measured: float, planned: float, digits: int) -> list[str]:
    return [f"{measured:.{digits}f}", f"{planned:.{digits}f}", f"{planned / measured - 1:+.0%}"]


def main() -> None:
    rows = [row for name, vocab in RUNS.items() for row in rows_of(name, vocab)]
    print(common.table(["", "measured", "planned", ""], rows))


if __name__ == "__main__":
    main()
