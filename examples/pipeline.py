"""Pipeline and sharded data parallelism together: torch's 1F1B schedule on stages that fsdp2 shards.

    torchrun --nproc_per_node=4 examples/pipeline.py      # 2 stages x 2 shards; one process per GPU, or on CPU
    torchrun --nproc_per_node=2 examples/pipeline.py      # 2 stages, each on one rank

The task: from a vector of 32 numbers tell which of its four quarters has the largest sum.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fsdp2 import fully_shard

NUM_STAGES = 2
NUM_MICROBATCHES = 4


def make_stages() -> list[nn.Sequential]:
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:], nn.Linear(32, 4))]


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) % NUM_STAGES:
        raise SystemExit(f"start it with torchrun on a multiple of {NUM_STAGES} processes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (NUM_STAGES, dist.get_world_size() // NUM_STAGES), mesh_dim_names=("pp", "dp"))
    stage_index = mesh.get_local_rank("pp")
    is_first, is_last = stage_index == 0, stage_index == NUM_STAGES - 1

    torch.manual_seed(0)  # alike on each rank, which then keeps the stage that it runs
    model = make_stages()[stage_index].to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)  # kept for all microbatches
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(model, stage_index, NUM_STAGES, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + mesh.get_local_rank("dp"))  # the ranks of one pipeline draw the same data
    for step in range(1, 101):
        x = torch.randn(64, 32, device=device)
        labels = x.unflatten(1, (4, 8)).sum(dim=2).argmax(dim=1)
        losses: list[torch.Tensor] = []
        target = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*([x] if is_first else []), **target)  # gradients arrive averaged over microbatches and ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and is_last and mesh.get_local_rank("dp") == 0:
            print(f"step {step:>3}  loss {torch.stack(losses).mean().item():.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
