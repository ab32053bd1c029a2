"""What docs/migration.md says of DDP: the cases of these rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import (
    FSDPModule,
    MixedPrecisionPolicy,
    ZeroPolicy,
    auto_shard,
    by_size,
    events,
    fully_shard,
)
from tests.helpers.migration_cases import (
    BF16,
    DIM,
    LAYERS,
    MICROBATCHES,
    Net,
    averaged,
    case,
    counts,
    gradients,
    none,
    quiet,
    run,
    same,
    shard,
    stack,
    units_of,
    weights,
)


@case("DDP", "`model = DistributedDataParallel(model)`")
def ddp(rank: int, world_size: int) -> None:
    same(rank, shard(), DistributedDataParallel(stack()), collectives=False)


@case("DDP", "the same memory and communication as DDP")
def like_ddp(rank: int, world_size: int) -> None:
    ours = fully_shard(stack(), zero=ZeroPolicy(0))  # one unit, as DDP has one bucket of so few parameters
    same(rank, ours, DistributedDataParallel(stack()), collectives=False)
    with events.record() as log:
        run(ours, rank)
    assert counts(log) == {"all_reduce": 1}
    assert ours[0].weight.to_local().shape == ours[0].weight.shape


@case("DDP", "optimizer before or after")
def optimizer_after(rank: int, world_size: int) -> None:
    model = stack()
    before = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    assert model[0].weight is not before
    fsdp2.adopt_optimizer(optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


@none("DDP", "values are broadcast from rank 0", "broadcast", "sync_module")
def nothing_is_sent(rank: int, world_size: int) -> None:
    model = nn.Linear(DIM, DIM, bias=False)
    nn.init.constant_(model.weight, float(rank))
    with CommDebugMode() as mode:
        fully_shard(model)
    assert mode.get_total_counts() == 0 and model.weight.to_local().eq(rank).all()


@case("DDP", "`with model.no_sync():`")
def ddp_no_sync(rank: int, world_size: int) -> None:
    accumulate_like(rank, shard(), DistributedDataParallel(stack()))


def accumulate_like(rank: int, ours: Any, theirs: Any) -> None:
    """Microbatches without sync, and a last one with it: the same gradients, one reduction a unit."""
    with events.record() as log:
        for index in range(MICROBATCHES):
            ours.set_requires_gradient_sync(index == MICROBATCHES - 1)
            run(ours, rank, index)
    with quiet():
        with theirs.no_sync():
            for index in range(MICROBATCHES - 1):
                run(theirs, rank, index)
        run(theirs, rank, MICROBATCHES - 1)
    assert counts(log)["reduce_scatter"] == LAYERS
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(mine, other)


class Branches(nn.Module):
    """Every rank uses another layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.layers = rank, nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.rank](x)


@case("DDP", "`find_unused_parameters=True`")
@case("DeepSpeed", "`ignore_unused_parameters`")
def unused(rank: int, world_size: int) -> None:
    alike: Any = fully_shard(Branches(0))
    run(alike, rank)
    assert [param.grad is None for param in alike.parameters()] == [False, False, True, True]
    model: Any = fully_shard(Branches(rank))
    model.set_reduce_scatter_unused_params(True)
    theirs = DistributedDataParallel(Branches(rank), find_unused_parameters=True)
    same(rank, model, theirs, collectives=False)


@case("DDP", "`static_graph=True`")
def reused(rank: int, world_size: int) -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, self.layers[0]):
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    ours = Reuses()
    shard(ours.layers)
    with quiet():
        same(rank, fully_shard(ours), DistributedDataParallel(Reuses(), static_graph=True), collectives=False)


@none("DDP", "`bucket_cap_mb=`, `gradient_as_bucket_view=`", "bucket")
def units_are_buckets(rank: int, world_size: int) -> None:
    report = auto_shard(Net(), by_size(4 * DIM * DIM))
    assert units_of(report) == ["blocks.0.large", "blocks.1.large", ""]


@none("DDP", "`broadcast_buffers=True`", "buffers_", "broadcast")
def buffers_stay(rank: int, world_size: int) -> None:
    model = fully_shard(nn.BatchNorm1d(DIM))
    with events.record() as log:
        run(model, rank)
    assert counts(log) == {"all_gather": 1, "reduce_scatter": 1}
    mean = model.running_mean.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, model.running_mean) == (rank == 0)


@case("DDP", "`register_comm_hook(state, bf16_compress_hook)`")
def compressed(rank: int, world_size: int) -> None:
    """DDP's bf16 hook needs NCCL; its fp16 hook is the same with another dtype."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    theirs = DistributedDataParallel(stack())
    theirs.register_comm_hook(None, fp16_compress_hook)
    ours = shard(mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=BF16))
    with events.record() as log:
        same(rank, ours, theirs, collectives=False, tolerance=1e-2)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    custom_reduction(rank, world_size)


def custom_reduction(rank: int, world_size: int) -> None:
    """A reduce-scatter of the user's own that sums and then doubles."""

    class Doubles:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any) -> None:
            dist.all_reduce(input_tensor, group=group)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()] * 2)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())

    ours = fully_shard(nn.Linear(DIM, DIM, bias=False))
    plain = copy.deepcopy(nn.Linear(DIM, DIM, bias=False))
    plain.load_state_dict(weights(ours))
    ours.set_custom_reduce_scatter(Doubles())
    run(ours, rank)
    averaged(rank, world_size, _halved(ours), plain)


def _halved(model: Any) -> Any:
    for param in model.parameters():
        param.grad = param.grad / 2
    return model


none("DDP", "`with model.join():`", "join")


@case("DDP", "`model.module`")
@case("FSDP1", "`module`")
@case("Accelerate", "`accelerator.unwrap_model(model)`")
def not_wrapped(rank: int, world_size: int) -> None:
    plain = stack()
    model = fully_shard(plain)
    assert model is plain and isinstance(model, nn.Sequential) and isinstance(model, FSDPModule)


@case("DDP", "`model.state_dict()` with `module.` in the keys")
@case("FSDP1", "`use_orig_params=True`")
@case("Accelerate", "`use_orig_params=`")
def plain_names(rank: int, world_size: int) -> None:
    model = shard()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] == list(stack().state_dict())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
