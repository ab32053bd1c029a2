"""A small mixture of experts under data parallelism: each rank's tokens choose their experts, all ranks run alike.

    python examples/launch.py --standalone --nproc_per_node=2 examples/moe.py            # CPU, or a GPU each
    python examples/launch.py --standalone --nproc_per_node=2 examples/moe.py --resume --steps 200
    python examples/moe.py                                                               # one process

An expert may get no token on one rank and some on another. What a rank skips, the others wait for, if it is a unit: so
an expert must not be a unit that is called only when it has tokens. Here the weights of all experts of a block are
stacked in two parameters of one unit, which runs on every rank in every step; the gradient of an expert without tokens
is zero. (Where each expert is a unit, call it in any case, on a batch of no tokens.)

The task: continue x, a*x + b, ... modulo 13; the first token says which a and b. `--help` lists the options.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from runtime import mean_over_ranks
from short_run import Run, SelfAttention
from torch import Tensor, nn

from fsdp2 import checkpoint, fully_shard
from fsdp2.init import materialize

MODULUS, RULES, LENGTH = 13, ((1, 1), (1, 5), (2, 3), (6, 0), (7, 1), (11, 4)), 16
DIM, HEADS, HIDDEN, DEPTH, EXPERTS, CHOSEN = 32, 4, 64, 2, 8, 2
BALANCE = 0.01  # weight of the auxiliary loss
HELD_OUT = 1_000_000  # the number of a batch that no step reaches


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
        self.attention = SelfAttention(DIM, HEADS, causal=True)
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
def validate(run: Run, model: nn.Module) -> str:
    loss, balance, shares = losses(model, *run.part(draw(HELD_OUT, 256)))
    used = " ".join(f"{share:.0%}" for share in shares[0])
    loss, balance = mean_over_ranks(loss), mean_over_ranks(balance)
    return f"held-out loss {loss:.4f}  balance {balance:.3f}  experts of block 0: {used}"


def main() -> None:
    run = Run("moe", __doc__, steps=100)
    with torch.device("meta"):  # shapes without memory
        model = MoE()
    for block in model.blocks:
        fully_shard(block.experts, **run.sharding)  # most of the weights: a unit of their own
        fully_shard(block, **run.sharding)
    fully_shard(model, **run.sharding)
    materialize(model, seed=0)  # each rank allocates its shards; the values are those of one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    done, newest = 0, checkpoint.latest(run.out) if run.resume else None
    if newest is not None:  # written by any number of ranks
        done = checkpoint.load(newest, model=model, optimizer=optimizer).step
    run.say(f"step {done:>4}  {validate(run, model)}")
    for step in range(done + 1, run.steps + 1):
        loss, balance, _ = losses(model, *run.part(draw(step, run.batch_size)))
        (loss + BALANCE * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == run.steps:
            run.say(f"step {step:>4}  {validate(run, model)}")
    if run.steps > done:
        checkpoint.save(run.out, model=model, optimizer=optimizer, step=run.steps, overwrite=True)
    run.end()


if __name__ == "__main__":
    main()
