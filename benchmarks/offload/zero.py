"""DeepSpeed's ZeRO-3 with offload, as its users configure it; the same model, data, clipping and AdamW as the others.

It compiles extensions (AdamW for the CPU, collectives in shared memory, asynchronous files) when it is first used, for
which it needs a C++ compiler, and libaio for the files. README.md says how it was installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import common

__all__ = ["HOST", "disk", "engine", "variants", "version"]

# Defaults of DeepSpeed, but for the devices. Parameters of fewer than 100,000 elements then stay whole on every rank,
# which spares it nearly all all-gathers of a narrow model.
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

OPTIONS = ("lr", "betas", "eps", "weight_decay")  # of AdamW, by its names


def disk(folder: Path) -> dict[str, Any]:
    """The optimizer's state in files below `folder`."""
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}}


def version() -> str:
    """Of the installed DeepSpeed."""
    return version_of("deepspeed")


def engine(model: nn.Module, offload: dict[str, Any], batch: int, clip: float) -> Any:
    """DeepSpeed's engine with AdamW, with torch's defaults.

    Args:
        offload: of ZeRO's options, those that say what is kept where.
        clip: the largest norm of the gradients; 0 does not clip.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    defaults = torch.optim.AdamW(model.parameters()).defaults
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {key: defaults[key] for key in OPTIONS}},
        "zero_optimization": {"stage": 3, **offload},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def variants(workload: common.Workload, num_steps: int, folder: Path) -> dict[str, Callable[[], None]]:
    """Some training steps of each setting, until everything is done; with files below `folder`, which stay."""
    settings = {"DeepSpeed, ZeRO-3, all": HOST, "DeepSpeed, ZeRO-Infinity, states on disk": disk(folder)}
    return {name: _variant(workload, num_steps, offload) for name, offload in settings.items()}


def _variant(workload: common.Workload, num_steps: int, offload: dict[str, Any]) -> Callable[[], None]:
    trained = engine(workload.model(), offload, workload.batch, clip=1.0)
    batches = workload.data()

    def run() -> None:
        for tokens, targets in batches[:num_steps]:
            loss = F.cross_entropy(trained(tokens).flatten(0, 1), targets.flatten())
            trained.backward(loss)
            trained.step()

    return run
