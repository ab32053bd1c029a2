"""The sharded model and its optimizer: where these examples differ from training in one process.

Imported by `train_lm.py`.
"""

from __future__ import annotations

import math

import torch
from data import Batch
from model import LM
from options import Options
from torch import Tensor

from fsdp2 import offload_optimizer
from fsdp2.optim import matrix_optimizer
from fsdp2.parallel import Meshes, parallelize, positions, shard_sequence

# With tensor parallelism: which layers are split, and along what. Attention is split by heads.
TENSOR_PLAN = {f"blocks.*.attention.{name}": "colwise" for name in ("q", "k", "v")}
TENSOR_PLAN |= {f"blocks.*.mlp.{name}": "colwise" for name in ("gate", "up")}
TENSOR_PLAN |= {"blocks.*.attention.out": "rowwise", "blocks.*.mlp.down": "rowwise"}


def build_model(options: Options, meshes: Meshes, device: torch.device) -> LM:
    """The sharded model with its first weights; no rank ever holds more of it than its shards and one whole tensor."""
    with torch.device("meta"):  # shapes without memory
        model = LM(options.model(), options.seq_len)
    # Each block becomes a unit of `fully_shard`; the root unit takes what no block has: embedding, last norm, head.
    parallelize(model, options.parallel, meshes=meshes, blocks="Block", tp_plan=TENSOR_PLAN)
    model.to_empty(device=device)
    model.init_weights(options.seed)
    return model


def build_optimizer(options: Options, model: LM) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters: each rank keeps states for, and updates, its own shards alone. Or Muon for the
    blocks' matrices, of which each rank steps some as a whole, and AdamW for the rest, in one optimizer."""
    if options.optimizer == "muon":
        return muon(options, model)
    # Gains have no weight decay. With tensor parallelism some parameters are on a mesh of their own, and one fused
    # operation takes those of one mesh.
    groups: dict[object, list[Tensor]] = {}
    for parameter in sorted(model.parameters(), key=lambda parameter: parameter.ndim <= 1):
        groups.setdefault((parameter.ndim > 1, getattr(parameter, "device_mesh", None)), []).append(parameter)
    decay = {True: options.weight_decay, False: 0.0}
    settings = [{"params": each, "weight_decay": decay[each[0].ndim > 1]} for each in groups.values()]
    if options.parallel.offload != "none":
        return offload_optimizer(torch.optim.AdamW, settings, lr=options.lr, betas=(0.9, 0.95), fused=True)
    # fused: one operation for all parameters; the default loop would pay DTensor's overhead for each.
    return torch.optim.AdamW(settings, lr=options.lr, betas=(0.9, 0.95), fused=True)


def muon(options: Options, model: LM) -> torch.optim.Optimizer:
    """With its learning rate adjusted so that the one of AdamW fits both."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    chosen = set(matrices)
    rest = [parameter for parameter in model.parameters() if parameter not in chosen]
    both = {"lr": options.lr, "weight_decay": options.weight_decay}
    adamw = {**both, "kind": torch.optim.AdamW, "betas": (0.9, 0.95), "fused": True}
    groups = [
        {"params": matrices},
        {"params": [parameter for parameter in rest if parameter.ndim > 1], **adamw},
        {"params": [parameter for parameter in rest if parameter.ndim <= 1], **adamw, "weight_decay": 0.0},
    ]
    return matrix_optimizer(torch.optim.Muon, groups, **both, adjust_lr_fn="match_rms_adamw")


def local_part(batch: Batch, meshes: Meshes) -> tuple[Tensor, Tensor, Tensor | None]:
    """What this rank computes of a batch: inputs, targets, and the places of the tokens if it has not all of them."""
    inputs, targets = batch
    if meshes.context is None:
        return inputs, targets, None
    part = shard_sequence({"inputs": inputs, "targets": targets}, meshes.context)
    return part["inputs"], part["targets"], positions(inputs.shape[1], meshes.context, device=inputs.device)


def learning_rate(step: int, options: Options) -> float:
    """Of the step with this number (from 1): linear warm-up, then cosine decay to a tenth of the peak."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
