"""A small mixture of experts under data parallelism: each rank's tokens choose their experts, all ranks run alike.

    torchrun --nproc_per_node=2 examples/moe.py            # CPU, or a GPU each
    torchrun --nproc_per_node=2 examples/moe.py --resume --steps 200
    python examples/moe.py                                     # one process

An expert may get no token on one rank and some on another. What a rank skips, the others wait for, if it is a unit: so
an expert must not be a unit that is called only when it has tokens. Here the weights of all experts of a block are
stacked in two parameters of one unit, which runs on every rank in every step; the gradient of an expert without tokens
is zero. (Where each expert is a unit, call it in any case, on a batch of no tokens.)

The task: continue x, a*x + b, ... modulo 13; the first token says which a and b. `--help` lists the options.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import checkpoint, fully_shard
from fsdp2.init import materialize

MODULUS, RULES, LENGTH = 13, ((1, 1), (1, 5), (2, 3), (6, 0), (7, 1), (11, 4)), 16
DIM, HEADS, HIDDEN, DEPTH, EXPERTS, CHOSEN = 32, 4, 64, 2, 8, 2
BALANCE = 0.01  # weight of the auxiliary loss
HELD_OUT = 1_000_000  # the number of a batch that no step reaches


class SelfAttention(nn.Module):
    """[batch, tokens, DIM] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """EXPERTS small MLPs, stacked. Each rank holds some experts' rows, and gathers all for its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=DIM**-0.5)
        nn.init.normal_(self.down, std=HIDDEN**-0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens [n, DIM] through their experts [n, CHOSEN], whose outputs are weighted [n, CHOSEN] and added."""
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(chosen == expert)  # maybe none: then all of this is empty, and harmless
            y = F.gelu(x[token] @ up) @ down
            out = out.index_add(0, token, y * weights[token, place, None])
        return out


class Block(nn.Module):
    """Attention, then the experts. Returns the auxiliary loss and each expert's share of the tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = SelfAttention()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        tokens = self.norm(x).flatten(0, 1)
        probabilities = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(CHOSEN)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).type_as(x)
        # The Switch Transformer's auxiliary loss, least where all experts are used equally. Shares are those of all
        # ranks' tokens: with its own alone, each rank would balance its part of the batch, which is another loss.
        share = F.one_hot(chosen, EXPERTS).float().mean(dim=(0, 1))
        dist.all_reduce(share)
        share /= dist.get_world_size()
        balance = EXPERTS * (share * probabilities.mean(dim=0)).sum()
        return x + self.experts(tokens, chosen, weights).view_as(x), balance, share


class MoE(nn.Module):
    """Tokens [batch, LENGTH] to logits, the blocks' auxiliary loss, and their shares [DEPTH, EXPERTS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(MODULUS + len(RULES), DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, MODULUS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(tokens) + self.places.weight
        routing = []
        for block in self.blocks:
            x, *of_block = block(x)
            routing.append(of_block)
        balances, shares = map(torch.stack, zip(*routing, strict=True))
        return self.head(x), balances.mean(), shares


def draw(number: int, size: int) -> Tensor:
    """Batch `number`, [size, LENGTH + 1]: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(number)
    rules, x = (torch.randint(high, (size,), generator=generator) for high in (len(RULES), MODULUS))
    a, b = torch.tensor(RULES)[rules].T
    columns = [MODULUS + rules, x]
    while len(columns) <= LENGTH:
        columns.append((a * columns[-1] + b) % MODULUS)
    return torch.stack(columns, dim=1)


def losses(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what follows x, which nobody can know; the auxiliary loss; the shares."""
    logits, balance, shares = model(tokens[:, :-1])
    return F.cross_entropy(logits[:, 1:].flatten(0, 1).float(), tokens[:, 2:].flatten()), balance, shares


@torch.no_grad()
def validate(device: torch.device, model: nn.Module) -> str:
    loss, balance, shares = losses(model, *part([draw(HELD_OUT, 256)], device))
    used = " ".join(f"{share:.0%}" for share in shares[0])
    loss, balance = mean_over_ranks(loss), mean_over_ranks(balance)
    return f"held-out loss {loss:.4f}  balance {balance:.3f}  experts of block 0: {used}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps, those before a resume included")
    add("--batch-size", type=int, default=64, help="examples a step, over all ranks: a multiple of their number")
    add("--out", type=Path, default=Path("runs/moe"), help="folder for checkpoints")
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
    with torch.device("meta"):  # shapes without memory
        model = MoE()
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh)  # most of the weights: a unit of their own
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, seed=0)  # each rank allocates its shards; the values are those of one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    done, newest = 0, checkpoint.latest(options.out) if options.resume else None
    if newest is not None:  # written by any number of ranks
        done = checkpoint.load(newest, model=model, optimizer=optimizer).step
    say(f"step {done:>4}  {validate(device, model)}")
    for step in range(done + 1, options.steps + 1):
        loss, balance, _ = losses(model, *part([draw(step, options.batch_size)], device))
        (loss + BALANCE * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps:
            say(f"step {step:>4}  {validate(device, model)}")
    if options.steps > done:
        checkpoint.save(options.out, model=model, optimizer=optimizer, step=options.steps, overwrite=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
