"""A program that was written for torch's FSDP2, migrated by its import line. `tests/system/test_typing.py` runs mypy on
it."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)


class Model(nn.Module):
    """Some blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def shard(model: Model, offload: bool) -> FSDPModule:
    """As in torch's tutorial, with its return value."""
    mesh = init_device_mesh("cuda", (8,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if offload:
        return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def train(model: Model, batches: list[torch.Tensor]) -> None:
    """Accumulates over `batches`."""
    sharded = shard(model, offload=False)
    fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for index, batch in enumerate(batches):
        is_last: bool = index == len(batches) - 1
        sharded.set_is_last_backward(is_last)
        sharded.set_requires_gradient_sync(is_last, recurse=True)
        model(batch).sum().backward()
    handle: UnshardHandle | None = sharded.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    sharded.reshard()
    optimizer.step()
    pair = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    pair[0].set_modules_to_forward_prefetch([pair[1]])
    share_comm_ctx(pair)
    register_fsdp_forward_method(model, "generate")
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
    fsdp2.checkpoint.save("run/step-1", model=model, optimizer=optimizer)
    version: str = fsdp2.__version__
    print(version)


# What torch's types refuse, ours refuse. mypy reports an ignore that is not needed.
fully_shard(nn.Linear(2, 2), mesh=[0, 1])  # type: ignore[call-overload]
fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)  # type: ignore[call-overload]
fully_shard(nn.Linear(2, 2), None)  # type: ignore[call-overload]
fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync("no")  # type: ignore[arg-type]
