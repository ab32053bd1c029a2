"""Data, tensor, context and pipeline parallelism in one program, chosen by a file or on the command line.

    torchrun --nproc_per_node=4 examples/parallel.py shard=2 tensor=2
    torchrun --nproc_per_node=4 examples/parallel.py pipeline=2 context=2 activation_checkpointing=full
    torchrun --nproc_per_node=8 examples/parallel.py --config run.toml     # a table [parallel] with the same keys

Whatever the degrees, all ranks together see the same batches, so the losses printed are the same up to rounding.
The task: continue 3, 5, 7, 1, 3, ... (the same step again and again, modulo 8).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from fsdp2.parallel import Meshes, ParallelConfig, build_meshes, parallelize, shard_sequence

VOCAB, DIM, HEAD_DIM, DEPTH, LENGTH = 8, 32, 8, 4, 16
SEQUENCES, GLOBAL_BATCH, MICROBATCHES, EPOCHS = 128, 16, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        # -1: with tensor parallelism this rank's layers make only some of the heads
        q, k, v = (f(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


TENSOR_PLAN = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
TENSOR_PLAN |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}


class Stage(nn.Module):
    """One stage of the model; of one, the whole. The others' parts are made too, so that all draw the same weights."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        embed, places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        blocks, head = [Block() for _ in range(DEPTH)], nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB))
        per_stage = DEPTH // num_stages
        self.embed, self.places = (embed, places) if index == 0 else (None, None)
        self.blocks = nn.ModuleList(blocks[index * per_stage : (index + 1) * per_stage])
        self.head = head if index == num_stages - 1 else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_loader(meshes: Meshes) -> DataLoader[dict[str, torch.Tensor]]:
    """This rank's batches. Ranks of one tensor, context or pipeline group have one data rank: they get the same."""
    first, step = torch.randint(VOCAB, (2, SEQUENCES, 1), generator=torch.Generator().manual_seed(0))
    tokens = (first + step * torch.arange(LENGTH + 1)) % VOCAB
    data = [{"x": row[:-1], "targets": row[1:], "positions": torch.arange(LENGTH)} for row in tokens]
    sampler = DistributedSampler(data, meshes.data_ranks, meshes.data_rank, seed=0)
    return DataLoader(data, GLOBAL_BATCH // meshes.data_ranks, sampler=sampler)


def read_config() -> ParallelConfig:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a TOML or YAML file")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="keys of the config, instead of a file")
    options = parser.parse_args()
    if options.config:
        return ParallelConfig.load(options.config)
    given = dict(key.split("=", 1) for key in options.keys)
    return ParallelConfig.from_mapping({key: int(text) if text.isdigit() else text for key, text in given.items()})


def main() -> None:
    config = read_config()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    meshes = build_meshes(config, device.type)
    index, num_stages = meshes.stage, config.pipeline

    torch.manual_seed(0)  # alike on each rank
    model = parallelize(Stage(index, num_stages).to(device), config, meshes=meshes, blocks="Block", tp_plan=TENSOR_PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = None
    if meshes.pipeline is not None:
        stage = PipelineStage(model, index, num_stages, device, group=meshes.pipeline.get_group())
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    loader = make_loader(meshes)

    for epoch in range(1, EPOCHS + 1):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            if meshes.context is not None:
                batch = shard_sequence(batch, meshes.context)  # this rank's tokens of each sequence
            if schedule is None:
                loss = loss_of(model(batch["x"], batch["positions"]), batch["targets"])
                loss.backward()
            else:
                losses: list[torch.Tensor] = []
                inputs = (batch["x"], batch["positions"]) if index == 0 else ()
                schedule.step(*inputs, **({"target": batch["targets"], "losses": losses} if model.head else {}))
                loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), group=meshes.loss.get_group())
        if model.head and dist.get_rank() % (dist.get_world_size() // num_stages) == 0:  # one rank of the last stage
            print(f"epoch {epoch}  loss {loss.item() / meshes.loss.size():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at an ordinary end a thread of gloo may abort the process (torch 2.13), see `leave` in runtime.py


if __name__ == "__main__":
    main()
