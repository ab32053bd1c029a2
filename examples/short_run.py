"""What the short examples share: their command line, their place in the job, this rank's part of a batch, attention.

Imported by `vision.py`, `diffusion.py` and `moe.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from runtime import UsageError, World, choose_device, leave, on_every_rank, start_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy


class Run:
    """One run as this rank sees it: its place in the job, the options, and `sharding`, arguments of `fully_shard`."""

    def __init__(self, name: str, about: str | None, steps: int, batch_size: int = 64) -> None:
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = parser.add_argument
        add("--steps", type=int, default=steps, help=f"optimizer steps, those before a resume included ({steps})")
        add("--batch-size", type=int, default=batch_size, help=f"examples a step, over all ranks ({batch_size})")
        add("--out", type=Path, default=Path("runs") / name, help=f"folder for checkpoints (runs/{name})")
        add("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
        add("--bf16", action="store_true", help="compute in bfloat16; shards, gradients and optimizer stay float32")
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one")
        options = parser.parse_args()
        self.steps: int = options.steps
        self.batch_size: int = options.batch_size
        self.out: Path = options.out
        self.resume: bool = options.resume
        self.world: World = start_world()
        try:
            self.device = on_every_rank(lambda: choose_device(options.device, self.world))
            if self.batch_size % self.world.size:
                raise UsageError(f"--batch-size {self.batch_size} is no multiple of the {self.world.size} ranks")
        except UsageError as error:
            leave(self.world, error)
        self.sharding: dict[str, Any] = {"mesh": init_device_mesh(self.device.type, (self.world.size,))}
        if options.bf16:
            self.sharding["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)

    def part(self, *batch: Tensor) -> list[Tensor]:
        """This rank's part of a batch that every rank has drawn alike: the model trained does not depend on how many
        ranks there are. (Real data is read in parts: `torch.utils.data.DistributedSampler`.)"""
        return [whole[self.world.rank :: self.world.size].to(self.device) for whole in batch]

    def say(self, text: str) -> None:
        """Print once, not once for each rank."""
        if self.world.leads:
            print(text, flush=True)

    def end(self) -> None:
        leave(self.world)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, dim] to the same."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))
