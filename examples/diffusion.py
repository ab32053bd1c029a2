"""A small diffusion model (DDPM) with a moving average of its weights that is sharded like the weights themselves.

    torchrun --nproc_per_node=2 examples/diffusion.py            # CPU, or a GPU each
    torchrun --nproc_per_node=2 examples/diffusion.py --resume --steps 400
    python examples/diffusion.py                                     # one process

The task: images of one filled rectangle. At the end the averaged model draws some. `--help` lists the options.
"""

import argparse
import copy
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fsdp2 import checkpoint, fully_shard

SIZE, CHANNELS, DEPTH, NOISE_LEVELS = 12, 32, 4, 50
HELD_OUT = 1_000_000  # the number of a batch that no step reaches
SHADES = " .:-=+*#%@"
# How much of the signal is left at each noise level, from nearly all to nearly none (the cosine schedule).
SIGNAL = torch.cos(torch.linspace(0.05, 0.99, NOISE_LEVELS) * torch.pi / 2) ** 2


class Block(nn.Module):
    """Two convolutions around the noise level, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = nn.GroupNorm(4, CHANNELS), nn.GroupNorm(4, CHANNELS)
        self.level = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x))) + self.level(level)[:, :, None, None]
        return x + self.second(F.silu(self.second_norm(y)))


class Denoiser(nn.Module):
    """The noise in `images` [batch, 1, SIZE, SIZE] of noise levels [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Embedding(NOISE_LEVELS, CHANNELS)
        self.begin, self.end = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 1, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, images: Tensor, levels: Tensor) -> Tensor:
        x, level = self.begin(images), self.levels(levels)
        for block in self.blocks:
            x = block(x, level)
        return self.end(x)


def draw(number: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Batch `number`, the same on every rank and in every run: images of -1 and 1, noise, and noise levels."""
    generator = torch.Generator().manual_seed(number)
    corners = torch.randint(SIZE - 4, (2, size, 1), generator=generator)
    lengths = torch.randint(4, SIZE // 2 + 1, (2, size, 1), generator=generator)
    inside = (torch.arange(SIZE) >= corners) & (torch.arange(SIZE) < corners + lengths)
    images = (inside[0][:, :, None] & inside[1][:, None, :]).float() * 2 - 1
    levels = torch.randint(NOISE_LEVELS, (size,), generator=generator)
    return images[:, None], torch.randn(size, 1, SIZE, SIZE, generator=generator), levels


def loss_of(model: nn.Module, images: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
    signal = SIGNAL.to(images.device)[levels, None, None, None]
    return F.mse_loss(model(signal.sqrt() * images + (1 - signal).sqrt() * noise, levels).float(), noise)


def shards(model: nn.Module) -> list[Tensor]:
    """This rank's part of the parameters."""
    return [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@torch.no_grad()
def validate(device: torch.device, model: nn.Module) -> str:
    return f"held-out loss {mean_over_ranks(loss_of(model, *part(draw(HELD_OUT, 256), device))):.4f}"


@torch.no_grad()
def sample(device: torch.device, model: nn.Module, count: int) -> Tensor:
    """From pure noise to images, level by level. All ranks draw the same: each forward gathers weights, so that each
    rank must take part in all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, SIZE, SIZE, generator=generator).to(device)
    for level in reversed(range(NOISE_LEVELS)):
        now, before = SIGNAL[level], SIGNAL[level - 1] if level else torch.tensor(1.0)
        noise = model(x, torch.full((count,), level, device=device)).float()
        image = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        kept = now / before  # of the signal, from the level before to this one
        mean = before.sqrt() * (1 - kept) / (1 - now) * image + kept.sqrt() * (1 - before) / (1 - now) * x
        spread = ((1 - before) / (1 - now) * (1 - kept)).sqrt()
        x = mean + spread * torch.randn(x.shape, generator=generator).to(device)
    return x.cpu()


def as_text(images: Tensor) -> str:
    """Images [count, 1, SIZE, SIZE] side by side."""
    shades = ((images.clamp(-1, 1) + 1) / 2 * (len(SHADES) - 1)).round().int()
    return "\n".join("".join(SHADES[shade] * 2 for shade in row.flatten()) for row in shades[:, 0].transpose(0, 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps, those before a resume included")
    add("--batch-size", type=int, default=64, help="examples a step, over all ranks: a multiple of their number")
    add("--out", type=Path, default=Path("runs/diffusion"), help="folder for checkpoints")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
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
    torch.manual_seed(0)  # the same on each rank: all shard one model
    model = Denoiser().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # The root reshards too: the average is never in a backward, which would do it, and is updated as shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    ema = copy.deepcopy(model).requires_grad_(False)  # a sharded model of its own; nothing is sent
    average = get_ema_multi_avg_fn(0.98)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    both, done = nn.ModuleDict({"model": model, "ema": ema}), 0
    newest = checkpoint.latest(options.out) if options.resume else None
    if newest is not None:  # written by any number of ranks
        done = checkpoint.load(newest, model=both, optimizer=optimizer).step
    say(f"step {done:>4}  {validate(device, ema)}")
    for step in range(done + 1, options.steps + 1):
        loss_of(model, *part(draw(step, options.batch_size), device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average(shards(ema), shards(model), None)
        if step % 40 == 0 or step == options.steps:
            say(f"step {step:>4}  {validate(device, ema)}")
    if options.steps > done:
        checkpoint.save(options.out, model=both, optimizer=optimizer, step=options.steps, overwrite=True)
    say(as_text(sample(device, ema, count=5)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
