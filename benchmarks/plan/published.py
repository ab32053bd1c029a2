"""Plans of what others have published: torchtitan's tokens per second on 64 A100. See README.md.

python -m benchmarks.plan.published
"""

from __future__ import annotations

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
from fsdp2.plan import MACHINES, Workload, predict

LENGTH = 8192  # one sequence a rank
# https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md
PUBLISHED = {"8B": ("selective", 2904), "70B": ("full", 331)}
SIZES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
}


def tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return lm_loss(lambda ids: model(input_ids=ids).logits, batch)  # type: ignore[arg-type]


def row(name: str) -> list[str]:
    checkpointing, published = PUBLISHED[name]
    build = transformers_model("llama", vocab_size=128256, num_key_value_heads=8, **SIZES[name])
    config = ParallelConfig(mixed_precision="bf16", activation_checkpointing=checkpointing)
    start = time.process_time()
    plan = predict(Workload(build, tokens, loss), config, MACHINES["a100"], world_size=64)
    planned = LENGTH / plan.seconds
    shown = f"{plan.peak.total / 2**30:.1f}", f"{time.process_time() - start:.0f}"
    return [
        f"Llama 3 {name}",
        checkpointing,
        f"{published}",
        f"{planned:.0f}",
        f"{planned / published - 1:+.0%}",
        *shown,
    ]


def main() -> None:
    warnings.simplefilter("ignore")
    header = ["model", "checkpointing", "published, tokens/s", "planned", "error", "peak, GiB", "planning, s"]
    print(common.table(header, [row(name) for name in PUBLISHED]))


if __name__ == "__main__":
    main()
