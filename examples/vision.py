"""A small vision transformer that learns to tell generated images apart, one unit of `fully_shard` per block.

    torchrun --nproc_per_node=2 examples/vision.py            # CPU, or a GPU each
    torchrun --nproc_per_node=2 examples/vision.py --bf16     # compute in bfloat16
    torchrun --nproc_per_node=2 examples/vision.py --resume --steps 200
    python examples/vision.py                                     # one process

The task: noisy stripes in one of eight directions. `--help` lists the options.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, checkpoint, fully_shard
from fsdp2.init import materialize

SIZE, PATCH, DIM, HEADS, DEPTH, CLASSES = 16, 4, 64, 4, 4, 8
HELD_OUT = 1_000_000  # the number of a batch that no step reaches


class SelfAttention(nn.Module):
    """[batch, tokens, DIM] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = SelfAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x))


class ViT(nn.Module):
    """Images [batch, 1, SIZE, SIZE] to logits [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.empty((SIZE // PATCH) ** 2, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def reset_parameters(self) -> None:
        """Values for what belongs to this module itself; `materialize` asks every module."""
        nn.init.normal_(self.places, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def draw(number: int, size: int) -> tuple[Tensor, Tensor]:
    """Batch `number`, images and labels: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    angle, phase = labels[:, None, None] * math.pi / CLASSES, torch.rand(size, 1, 1, generator=generator)
    frequency = 0.1 + 0.1 * torch.rand(size, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images = torch.sin(2 * math.pi * (frequency * (angle.cos() * x + angle.sin() * y) + phase))
    images = images + 0.5 * torch.randn(images.shape, generator=generator)
    return images[:, None], labels


@torch.no_grad()
def validate(device: torch.device, model: nn.Module) -> str:
    images, labels = part(draw(HELD_OUT, 512), device)
    logits = model(images).float()
    loss = mean_over_ranks(F.cross_entropy(logits, labels))
    accuracy = mean_over_ranks((logits.argmax(dim=1) == labels).float().mean())
    return f"held-out loss {loss:.4f}  accuracy {accuracy:.1%}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps, those before a resume included")
    add("--batch-size", type=int, default=64, help="examples a step, over all ranks: a multiple of their number")
    add("--out", type=Path, default=Path("runs/vision"), help="folder for checkpoints")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    add("--bf16", action="store_true", help="compute in bfloat16; shards, gradients and optimizer stay float32")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def start(kind: str) -> torch.device:
    """Join the job of torchrun, or be a world of one process."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    return device


def say(text: str) -> None:
    """Print once, not once for each rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def part(batch: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """This rank's part of a batch that all ranks have drawn. The trained model does not depend on the number of ranks.
    (Real data is read in parts: `torch.utils.data.DistributedSampler`.)"""
    return [whole[dist.get_rank() :: dist.get_world_size()].to(device) for whole in batch]


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main() -> None:
    options = parse()
    device = start(options.device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if options.bf16 else MixedPrecisionPolicy()
    with torch.device("meta"):  # shapes without memory
        model = ViT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)  # a unit: gathered for forward and backward, freed after
    fully_shard(model, mesh=mesh, mp_policy=mixed)  # the rest: patches, places, head
    materialize(model, seed=0)  # each rank allocates its shards; the values are those of one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    done, newest = 0, checkpoint.latest(options.out) if options.resume else None
    if newest is not None:  # written by any number of ranks
        done = checkpoint.load(newest, model=model, optimizer=optimizer).step
    say(f"step {done:>4}  {validate(device, model)}")
    for step in range(done + 1, options.steps + 1):
        images, labels = part(draw(step, options.batch_size), device)
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()  # gradients arrive averaged over the ranks and sharded
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps:
            say(f"step {step:>4}  {validate(device, model)}")
    if options.steps > done:
        checkpoint.save(options.out, model=model, optimizer=optimizer, step=options.steps, overwrite=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
