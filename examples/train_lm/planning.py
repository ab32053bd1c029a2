"""What a run will take, in one line, before it takes it: `--plan`.

Imported by `train_lm.py`. A plan makes a process group of ranks that do not exist, so it has a process of its own.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from building import TENSOR_PLAN
from model import LM
from options import Options
from torch import Tensor, nn

from fsdp2 import FSDPError
from fsdp2.plan import MACHINES, Machine, Workload, compare

# Its rates are a guess.
CPU = Machine("cpu", 2**34, {"float32": 5e10}, 1e10, 1e9, 1e9, is_accelerator=False)


def explain(options: Options, world_size: int, device: torch.device) -> str:
    """Parameters, units, the peak of memory, and the setting that would help most."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    machine = next((each for known, each in MACHINES.items() if known in name.replace(" ", "")), CPU)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_line, options, world_size, machine).result()


def _line(options: Options, world_size: int, machine: Machine) -> str:
    def batch(size: int) -> Tensor:
        return torch.zeros(size, options.seq_len, dtype=torch.long)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    def build() -> LM:
        return LM(options.model(), options.seq_len)

    workload = Workload(build, batch, loss, batch_size=options.batch_size, microbatches=options.grad_accum)
    try:
        comparison = compare(workload, options.parallel, machine, world_size, blocks="Block", tp_plan=TENSOR_PLAN)
    except FSDPError as error:  # a run does not need its plan
        return str(error)
    return comparison.line + ("" if options.optimizer == "adamw" else " (all with AdamW)")
