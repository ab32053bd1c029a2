"""The sharded model and its optimizer: where these examples differ from training in one process.

Imported by `train_lm.py`.
"""

from __future__ import annotations

import math

import torch
from model import LM
from options import Options
from runtime import World
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard


def build_mesh(options: Options, world: World, device: torch.device) -> DeviceMesh:
    """One axis of shards, or with `--hsdp` two: gradients are then also averaged over the replicas."""
    if options.hsdp == 1:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (options.hsdp, world.size // options.hsdp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def build_model(options: Options, mesh: DeviceMesh, device: torch.device) -> LM:
    """The sharded model with its first weights; no rank ever holds more of it than its shards and one whole tensor."""
    policy = MixedPrecisionPolicy()
    if options.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = options.reshard_after_forward

    with torch.device("meta"):  # shapes without memory
        model = LM(options.model(), options.seq_len, recompute=options.activation_checkpointing)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # The root unit takes what no block has: embedding, last norm, head.
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights(options.seed)
    return model


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the sharded parameters: each rank keeps states for, and updates, its own shards alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    # fused: one operation for all parameters; the default loop would pay DTensor's overhead for each.
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, options: Options) -> float:
    """Of the step with this number (from 1): linear warm-up, then cosine decay to a tenth of the peak."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
