"""Plans of what others have published: torchtitan's tokens per second on 64 A100. And what a plan of 4096 ranks takes.
See README.md.

python -m benchmarks.plan.published
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.plan.cases import lm_loss, transformers_model
from fsdp2.parallel import ParallelConfig
from fsdp2.plan import MACHINES, Plan, Workload, predict

LENGTH = 8192  # one sequence a rank
# https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md
PUBLISHED = {"8B": ("selective", 2904), "70B": ("full", 331)}
SIZES = {
    "7B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
}


def tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return lm_loss(lambda ids: model(input_ids=ids).logits, batch)  # type: ignore[arg-type]


def planned(name: str, machine: str, ranks: int, checkpointing: str, **model: int) -> tuple[Plan, float]:
    """The plan, and the seconds of processor time that it took."""
    build = transformers_model("llama", **SIZES[name], **model)
    config = ParallelConfig(mixed_precision="bf16", activation_checkpointing=checkpointing)
    start = time.process_time()
    plan = predict(Workload(build, tokens, loss), config, MACHINES[machine], world_size=ranks)
    return plan, time.process_time() - start


def row(name: str) -> list[str]:
    checkpointing, published = PUBLISHED[name]
    plan, took = planned(name, "a100", 64, checkpointing, vocab_size=128256, num_key_value_heads=8)
    speed = LENGTH / plan.seconds
    speeds = f"{published}", f"{speed:.0f}", f"{speed / published - 1:+.0%}"
    return [f"Llama 3 {name}", checkpointing, *speeds, f"{plan.peak.total / 2**30:.1f}", f"{took:.0f}"]


def main() -> None:
    warnings.simplefilter("ignore")
    header = ["model", "checkpointing", "published, tokens/s", "planned", "error", "peak, GiB", "planning, s"]
    print(common.table(header, [row(name) for name in PUBLISHED]))
    took = planned("7B", "h100", 4096, "full", vocab_size=32000)[1]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n7B on 4096 ranks: {took:.0f} s of processor time; this process had at most {most:.1f} GiB")


if __name__ == "__main__":
    main()
