"""Sequences of very different lengths: what is won when ranks get equal work instead of equal numbers.

    torchrun --nproc_per_node=2 examples/unequal.py      # one process per GPU, or on CPU without one
    python examples/unequal.py --steps 5                 # one process

Each step has a batch of sequences, most short and a few long, as answers of a language model are. A microbatch packs
several into one row. Two ways to share them out take turns, on the same batches:

    in order    each rank takes the next sequences, as many as the others, and packs them as they come
    balanced    fsdp2.balance packs them so that all microbatches cost about the same

Within fsdp2.join ranks may run different numbers of microbatches, and gradients are those of the whole batch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard
from fsdp2.plan import sequence_cost

VOCAB, DIM, HEADS, DEPTH = 64, 128, 4, 3
LONGEST, PER_RANK = 2048, 8  # tokens of a microbatch, and of the longest sequence; sequences of a rank in a step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, DIM // HEADS))
        # [3, heads, tokens of one sequence, head_dim]: a sequence attends to itself alone.
        each = [
            F.scaled_dot_product_attention(*part.permute(1, 2, 0, 3), is_causal=True) for part in qkv.split(lengths)
        ]
        x = x + self.out(torch.cat(each, dim=1).transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm(x))


class LM(nn.Module):
    """Logits of the next tokens, for several sequences behind each other: tokens [tokens], their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(x)


def loss_of(model: nn.Module, sequences: list[Tensor]) -> Tensor:
    """The mean over all tokens but each sequence's last."""
    logits = model(torch.cat(sequences), [len(sequence) for sequence in sequences])
    targets = torch.cat([torch.cat([sequence[1:], sequence.new_full((1,), -100)]) for sequence in sequences])
    return F.cross_entropy(logits, targets)


def in_order(lengths: list[int], num_ranks: int) -> list[list[list[int]]]:
    """Equal numbers of sequences, packed as they come."""
    ranks = []
    for rank in range(num_ranks):
        microbatches: list[list[int]] = [[]]
        for index in range(rank, len(lengths), num_ranks):
            if sum(lengths[other] for other in microbatches[-1]) + lengths[index] > LONGEST:
                microbatches.append([])
            microbatches[-1].append(index)
        ranks.append(microbatches)
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each way")
    steps = parser.parse_args().steps
    if "RANK" not in os.environ:  # not started by torchrun: a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = LM().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cost = sequence_cost(LM, lambda length: [torch.zeros(length, dtype=torch.long)], loss_of)

    draw = random.Random(0)  # alike on each rank, which thus know the whole batch
    seconds: dict[str, list[float]] = {"in order": [], "balanced": []}
    for step in range(1 + steps):  # the first is not counted
        lengths = [min(LONGEST, 2 + int(draw.lognormvariate(5, 1.2))) for _ in range(num_ranks * PER_RANK)]
        tokens = [(draw.randrange(VOCAB) + torch.arange(length)) % VOCAB for length in lengths]
        ways = {"in order": in_order(lengths, num_ranks), "balanced": fsdp2.balance(lengths, num_ranks, LONGEST, cost)}
        for name, ranks in ways.items():
            dist.barrier()
            start = time.perf_counter()
            total = torch.zeros((), device=device)
            with fsdp2.join(model) as work:
                for indices in work.each(ranks[rank]):
                    loss = loss_of(model, [tokens[index].to(device) for index in indices])
                    count = sum(lengths[index] - 1 for index in indices)
                    work.backward(loss, weight=count)
                    total += loss.detach() * count
            dist.all_reduce(total)
            optimizer.step()
            optimizer.zero_grad()
            if step:
                seconds[name].append(time.perf_counter() - start)
        if rank == 0:
            print(f"step {step:>3}  loss {total.item() / sum(length - 1 for length in lengths):.3f}")
    before, after = (statistics.median(each) for each in seconds.values())
    if rank == 0:
        print(f"in order {before:.3f} s a step, balanced {after:.3f} s: {1 - after / before:.0%} of the time is saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
