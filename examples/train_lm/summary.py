"""A run in words and numbers: the effective settings that are printed, and those that a checkpoint remembers.

Imported by `train_lm.py` and `finetune.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from data import BatchPlan, Corpus
from options import Options
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.parallel import ParallelConfig


def describe(options: Options, corpus: Corpus, plan: BatchPlan, model: nn.Module, mesh: DeviceMesh) -> dict[str, str]:
    """The effective settings, for a person."""
    parameters = list(model.parameters())
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    axes = " x ".join(f"{size} {name}" for size, name in zip(mesh.shape, mesh.mesh_dim_names or (), strict=True))
    plain = ParallelConfig()
    settings = (
        "reshard_after_forward",
        "mixed_precision",
        "activation_checkpointing",
        "compile",
        "cpu_offload",
        "offload",
    )
    chosen = [f"{name}={getattr(options.parallel, name)}" for name in settings]
    changed = [text for text in chosen if text not in [f"{name}={getattr(plain, name)}" for name in settings]]
    applied = ", ".join(changed) or "float32"
    return {
        "model": f"{sum(p.numel() for p in parameters):,} parameters, {here:,} of them on this rank; {options.model()}",
        "text": f"{len(corpus.train):,} training and {len(corpus.valid):,} validation bytes "
        f"({corpus.num_files:,} files, {corpus.split})",
        "mesh": f"{axes} on {mesh.device_type}; {applied}",
        "step": f"{plan.tokens_per_step:,} bytes = {plan.world_size} ranks x {plan.microbatches} microbatches "
        f"x {plan.per_rank} sequences x {plan.seq_len}",
        "optimizer": f"{options.optimizer}, {options.steps} steps, lr {options.lr} after {options.warmup} of warm-up, "
        f"weight_decay {options.weight_decay}, clip {options.clip}, seed {options.seed}",
        "folder": str(options.out),
    }


def fingerprint(options: Options, corpus: Corpus, plan: BatchPlan) -> dict[str, object]:
    """What must stay equal for a resumed run to end in the very parameters of an uninterrupted one."""
    names = ("steps", "batch_size", "seq_len", "grad_accum", "lr", "warmup", "weight_decay", "clip", "seed")
    chosen = {name: getattr(options, name) for name in (*names, "optimizer")}
    bf16 = options.parallel.mixed_precision == "bf16"
    return {**chosen, "bf16": bf16, "world_size": plan.world_size, "data_crc32": corpus.crc32}


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The settings that changed since the checkpoint, for a note; empty if the run goes on exactly."""
    return ", ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name])
