"""The least that sharded training takes: build, shard, step.

    torchrun --nproc_per_node=2 examples/minimal.py      # one process per GPU, or on CPU without one
    python examples/minimal.py                           # one process

The task: from a vector of 32 numbers tell which of its four quarters has the largest sum.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp2 import fully_shard


def make_model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def main() -> None:
    if "RANK" not in os.environ:  # not started by torchrun: a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    torch.manual_seed(0)  # alike on each rank: all shard the same model
    model = make_model().to(device)
    for layer in model:
        fully_shard(layer)  # a unit: gathered before its forward and backward, freed after them
    fully_shard(model)  # the rest (here nothing), and the root that ties the units together
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding: it must see the shards

    torch.manual_seed(1 + dist.get_rank())  # from here on each rank draws data of its own
    for step in range(1, 101):
        x = torch.randn(64, 32, device=device)
        labels = x.unflatten(1, (4, 8)).sum(dim=2).argmax(dim=1)
        loss = F.cross_entropy(model(x), labels)
        loss.backward()  # gradients arrive averaged over the ranks and sharded
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:>3}  loss {loss.item():.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
