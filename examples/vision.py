"""A small vision transformer that learns to tell generated images apart, one unit of `fully_shard` per block.

    python examples/launch.py --standalone --nproc_per_node=2 examples/vision.py            # CPU, or a GPU each
    python examples/launch.py --standalone --nproc_per_node=2 examples/vision.py --bf16     # compute in bfloat16
    python examples/launch.py --standalone --nproc_per_node=2 examples/vision.py --resume --steps 200
    python examples/vision.py                                                               # one process

The task: noisy stripes in one of eight directions. `--help` lists the options.
"""

import math

import torch
import torch.nn.functional as F
from runtime import mean_over_ranks
from short_run import Run, SelfAttention
from torch import Tensor, nn

from fsdp2 import checkpoint, fully_shard
from fsdp2.init import materialize

SIZE, PATCH, DIM, HEADS, DEPTH, CLASSES = 16, 4, 64, 4, 4, 8
HELD_OUT = 1_000_000  # the number of a batch that no step reaches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = SelfAttention(DIM, HEADS, causal=False)
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
def validate(run: Run, model: nn.Module) -> str:
    images, labels = run.part(*draw(HELD_OUT, 512))
    logits = model(images).float()
    loss = mean_over_ranks(F.cross_entropy(logits, labels))
    accuracy = mean_over_ranks((logits.argmax(dim=1) == labels).float().mean())
    return f"held-out loss {loss:.4f}  accuracy {accuracy:.1%}"


def main() -> None:
    run = Run("vision", __doc__, steps=100)
    with torch.device("meta"):  # shapes without memory
        model = ViT()
    for block in model.blocks:
        fully_shard(block, **run.sharding)  # a unit: gathered before its forward and backward, freed after them
    fully_shard(model, **run.sharding)  # the rest: patches, places, head
    materialize(model, seed=0)  # each rank allocates its shards; the values are those of one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    done, newest = 0, checkpoint.latest(run.out) if run.resume else None
    if newest is not None:  # written by any number of ranks
        done = checkpoint.load(newest, model=model, optimizer=optimizer).step
    run.say(f"step {done:>4}  {validate(run, model)}")
    for step in range(done + 1, run.steps + 1):
        images, labels = run.part(*draw(step, run.batch_size))
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()  # gradients arrive averaged over the ranks and sharded
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == run.steps:
            run.say(f"step {step:>4}  {validate(run, model)}")
    if run.steps > done:
        checkpoint.save(run.out, model=model, optimizer=optimizer, step=run.steps, overwrite=True)
    run.end()


if __name__ == "__main__":
    main()
