"""Cases of docs/migration.md: from DeepSpeed and from Accelerate. See `migration_cases`."""

from __future__ import annotations

import copy
from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import (
    ArgumentError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ZeroPolicy,
    events,
    full_params,
    fully_shard,
)
from fsdp2._torch import local_tensor
from fsdp2.disk.mapped import file_of
from tests.helpers.migration_cases import (
    BF16,
    DIM,
    LAYERS,
    MICROBATCHES,
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
    step_with_flag,
    trains,
    weights,
)
from tests.helpers.migration_from_ddp import units_are_buckets
from tests.helpers.migration_from_fsdp1_states import FULL, no_sync, trained
from tests.helpers.migration_from_torch import local_step
from tests.helpers.parity_models import batch, mesh_2d
from tests.helpers.refused_by_torch import PackedLinear

# --- from DeepSpeed ---------------------------------------------------------------------------------------------------


@case("DeepSpeed", "`engine.backward(loss)`, `engine.step()`")
def plain_loop(rank: int, world_size: int) -> None:
    model, plain = shard(), DistributedDataParallel(stack())
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for index in range(2):
            run(each, rank, index)
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(weights(model).values(), plain.parameters(), strict=True):
        assert_close(mine, theirs.detach())


@case("Accelerate", "`accelerator.backward(loss)`")
def divided_losses(rank: int, world_size: int) -> None:
    """Two microbatches whose losses are divided by two are one batch of both."""
    model, plain = shard(), shard()
    batches = [batch(index, rank) for index in range(2)]
    for index, each in enumerate(batches):
        model.set_requires_gradient_sync(index == 1)
        (model(each).square().mean() / 2).backward()
    plain(torch.cat(batches)).square().mean().backward()
    for mine, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert_close(mine, theirs)


@case("Accelerate", "`accelerator.prepare(scheduler)`")
def schedules(rank: int, world_size: int) -> None:
    """torch's own scheduler sets the rate of sharded parameters, once for each call."""
    model = shard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    run(model, rank)
    optimizer.step()
    for _ in range(world_size):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**world_size


@case("DeepSpeed", "`engine.save_checkpoint`, `engine.load_checkpoint`, universal checkpoints", ranks=4)
@case("Accelerate", "`accelerator.save_state`, `accelerator.load_state`", ranks=4)
def checkpoints(rank: int, world_size: int) -> None:
    """Saved from four shards, loaded into two replicas of two."""
    import tempfile

    from fsdp2 import checkpoint

    box: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    model, optimizer = trained(rank)
    other = shard(mesh=mesh_2d(2, 2))
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    checkpoint.save(box[0], model=model, optimizer=optimizer, step=1)
    checkpoint.load(checkpoint.latest(box[0]), model=other, optimizer=fresh)
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(other).items())
    mine, theirs = optimizer.state[model[1].weight], fresh.state[other[1].weight]
    assert torch.equal(mine["exp_avg_sq"].full_tensor(), theirs["exp_avg_sq"].full_tensor())


@case("DeepSpeed", "reading a DeepSpeed checkpoint", ranks=2)
def reads_deepspeed(rank: int, world_size: int) -> None:
    """A universal checkpoint, sharded over other ranks than it was."""
    import tempfile
    from pathlib import Path

    from tests.helpers.deepspeed_saves import loads, write_universal

    box: list[Any] = [None]
    if rank == 0:
        box[0] = Path(tempfile.mkdtemp())
        write_universal(box[0], zero3=True)
    dist.broadcast_object_list(box)
    frozen = torch.arange(9.0).view(3, 3)
    loads(rank, world_size, box[0], frozen, sharded=True)


@case("DeepSpeed", "`zero_to_fp32.py`")
def whole_fp32(rank: int, world_size: int) -> None:
    states = get_model_state_dict(shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16)), options=FULL)
    assert all(torch.equal(value, stack().state_dict()[name]) for name, value in states.items())


def stage(rank: int, world_size: int, policy: ZeroPolicy, **wanted: int) -> None:
    model = shard(zero=policy)
    with events.record() as log:
        step_with_flag(model, rank)
    assert counts(log) == wanted
    reference = DistributedDataParallel(stack())
    with reference.no_sync():
        for index in range(MICROBATCHES - 1):
            run(reference, rank, index)
    run(reference, rank, MICROBATCHES - 1)
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        assert_close(mine, theirs)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    rows = DIM if policy.stage == 0 else DIM // (policy.shard_size or world_size)
    weight = model[0].weight
    for what in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
        assert tuple(what.to_local().shape) == (rows, DIM)


@case("DeepSpeed", "`stage: 0`")
def stage_0(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(0), all_reduce=LAYERS)


@case("DeepSpeed", "`stage: 1`")
def stage_1(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(1), all_gather=LAYERS, reduce_scatter=LAYERS)


@case("DeepSpeed", "`stage: 2`")
def stage_2(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(2), all_gather=LAYERS, reduce_scatter=LAYERS * MICROBATCHES)


@case("DeepSpeed", "`stage: 3`")
def stage_3(rank: int, world_size: int) -> None:
    times = LAYERS * MICROBATCHES
    stage(rank, world_size, ZeroPolicy(), all_gather=2 * times, reduce_scatter=times)


@case("DeepSpeed", "`offload_optimizer: {pin_memory: true}`, `offload_param: {pin_memory: true}`")
def pinned(rank: int, world_size: int) -> None:
    assert CPUOffloadPolicy().pin_memory and CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy()


@case("DeepSpeed", "`offload_optimizer: {ratio: ...}`")
def part_of_the_states(rank: int, world_size: int) -> None:
    trained = []
    for fraction in (0.5, 1.0):
        model: Any = fsdp2.fully_shard(stack(), offload_policy=fsdp2.Offload(states=True, fraction=fraction))
        optimizer = fsdp2.optim.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
        run(model, rank)
        optimizer.step()
        trained.append([param.full_tensor() for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@case("DeepSpeed", "`offload_optimizer: {device: nvme, nvme_path: ...}`")
def states_in_files(rank: int, world_size: int) -> None:
    trained = []
    with TemporaryDirectory() as folder:
        for tier in ("cpu", [f"{folder}/0", f"{folder}/1"]):
            model: Any = fsdp2.fully_shard(stack(), offload_policy=fsdp2.Offload(tier=tier))
            optimizer = fsdp2.optim.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
            for _ in range(2):
                run(model, rank)
                optimizer.step()
            trained.append([param.full_tensor() for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@case("DeepSpeed", "`offload_param: {device: nvme, nvme_path: ...}`")
def parameters_in_files(rank: int, world_size: int) -> None:
    trained = []
    with TemporaryDirectory() as folder:
        for policy in (fsdp2.Offload(), fsdp2.Offload(grads=True, params="files", tier=folder)):
            model: Any = fsdp2.fully_shard(stack(), offload_policy=policy)
            optimizer = fsdp2.optim.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
            for _ in range(2):
                run(model, rank)
                optimizer.step()
            trained.append([param.full_tensor() for param in model.parameters()])
        rests = [file_of(local_tensor(param)) is not None for param in model.parameters()]
    assert all(rests) and all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@case("DeepSpeed", "`reduce_scatter`", "`allgather_partitions`")
def kinds_of_collectives(rank: int, world_size: int) -> None:
    for number, expected in enumerate([{"all_reduce"}, *[{"all_gather", "reduce_scatter"}] * 3]):
        model = shard(zero=ZeroPolicy(number))
        with quiet(), CommDebugMode() as mode, events.record() as log:
            run(model, rank)
        assert set(counts(log)) == expected
        assert not any("broadcast" in str(operation) for operation in mode.get_comm_counts())


none("DeepSpeed", "`reduce_bucket_size`", "bucket")(units_are_buckets)
none("DeepSpeed", "`allgather_bucket_size`", "bucket")(units_are_buckets)


@none("DeepSpeed", "`contiguous_gradients`", "contiguous")
def gradients_go(rank: int, world_size: int) -> None:
    """When a unit's backward ends its whole gradients are freed, or on their way: two units' at most."""
    model = shard()
    whole: list[Tensor] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: whole.append(module.weight))
    held: list[int] = []
    loss = model(batch(0, rank)).square().mean()
    for weight in list(whole):
        weight.register_post_accumulate_grad_hook(lambda _: held.append(sum(w.grad is not None for w in whole)))
    loss.backward()
    assert len(held) == LAYERS and max(held) <= 2
    assert all(weight.grad is None for weight in whole)


@none("DeepSpeed", "`round_robin_gradients`", "round_robin")
@none("DeepSpeed", "`stage3_param_persistence_threshold`", "persist", "threshold")
@none("DeepSpeed", "`stage3_model_persistence_threshold`", "persist", "threshold")
def even_and_together(rank: int, world_size: int) -> None:
    """Every rank has its part of every parameter; small ones travel in the collective of their unit."""
    model = fully_shard(nn.Linear(DIM, DIM))
    assert [param.to_local().numel() * world_size for param in model.parameters()] == [DIM * DIM, DIM]
    with events.record() as log:
        run(model, rank)
    assert counts(log) == {"all_gather": 1, "reduce_scatter": 1}


none("DeepSpeed", "`sub_group_size`", "sub_group")(local_step)


@case("DeepSpeed", "`stage3_max_reuse_distance`")
def kept_for_reuse(rank: int, world_size: int) -> None:
    model = shard(reshard_after_forward=True)
    model[2].set_reshard_after_forward(False)
    with events.record() as log:
        run(model, rank)
    assert Counter(event.unit for event in log if event.kind == "all_gather") == {"0": 2, "1": 2, "2": 1}


@case("DeepSpeed", "`stage3_gather_16bit_weights_on_model_save`")
def whole_16_bit(rank: int, world_size: int) -> None:
    model = shard()
    with full_params(model, write_back=False, rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            states = {name: value.bfloat16() for name, value in model.state_dict().items()}
            assert all(torch.equal(value, stack().state_dict()[name].bfloat16()) for name, value in states.items())


@case("DeepSpeed", "`zero_hpz_partition_size`", ranks=4)
def secondary(rank: int, world_size: int) -> None:
    model = shard(zero=ZeroPolicy(3, secondary_shard_size=2))
    with events.record() as log:
        run(model, rank)
    found = Counter((event.kind, event.group_size) for event in log if event.group_size)
    assert found == {("all_gather", 4): LAYERS, ("all_gather", 2): LAYERS, ("reduce_scatter", 4): LAYERS}
    averaged(rank, world_size, model, stack())


@none("DeepSpeed", "`zero_quantized_nontrainable_weights`", "nontrainable", "quantise", "quantize")
def packed_weights(rank: int, world_size: int) -> None:
    plain = PackedLinear(torch.uint8)
    model = fully_shard(copy.deepcopy(plain))
    with events.record() as log:
        model.unshard()
    assert any(event.kind == "all_gather" for event in log)
    assert torch.equal(model.weight.flatten(), plain.weight.flatten()) and model.weight.dtype == torch.uint8


none("DeepSpeed", "`zeropp_loco_param`", "loco", "error_feedback")


@case("DeepSpeed", "`mics_shard_size`", ranks=4)
def small_groups(rank: int, world_size: int) -> None:
    times = LAYERS * MICROBATCHES
    stage(rank, 2, ZeroPolicy(3, shard_size=2), all_gather=2 * times, reduce_scatter=times, all_reduce=LAYERS)


none("DeepSpeed", "`mics_hierarchical_params_gather`", "hierarchical")


@none("DeepSpeed", "`memory_efficient_linear`", "memory_efficient")
def saved_weights(rank: int, world_size: int) -> None:
    """What autograd saved of a weight has no memory between forward and backward."""
    model = shard(reshard_after_forward=True)
    kept: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    loss = model(batch(0, rank)).square().mean()
    assert not isinstance(kept[0], DTensor) and kept[0].untyped_storage().nbytes() == 0
    loss.backward()


@case("DeepSpeed", "`elastic_checkpoint`, `load_from_fp32_weights`", ranks=4)
def elastic(rank: int, world_size: int) -> None:
    checkpoints(rank, world_size)


none("DeepSpeed", "`zenflow`", "zenflow", "async_step")


@case("DeepSpeed", "`fp16: {enabled: true}`")
def fp16(rank: int, world_size: int) -> None:
    model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    before = weights(model)
    loss = model(batch(0, rank)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    averaged(rank, world_size, model, stack(), tolerance=1e-2)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])
    model[0].weight.grad.to_local()[0, 0] = float("inf") if rank == 0 else 0.0
    stepped = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model)["0.weight"], stepped["0.weight"]) and scaler.get_scale() == 512


@case("DeepSpeed", "`data_types: {grad_accum_dtype: fp32}`")
def accumulation_dtype(rank: int, world_size: int) -> None:
    for reduce, wanted in ((torch.float32, torch.float32), (BF16, BF16), (None, torch.float32)):
        model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce))
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        run(model, rank)
        assert {layer.weight.grad.dtype for layer in model} == {wanted}


@case("DeepSpeed", "`gradient_accumulation_steps`")
def accumulation(rank: int, world_size: int) -> None:
    stage_2(rank, world_size)
    no_sync(rank, world_size)


@none("DeepSpeed", "`gradient_predivide_factor`, `prescale_gradients`", "predivide", "prescale")
def predivided(rank: int, world_size: int) -> None:
    """The sum of what fp16 cannot hold, the mean of which it can."""
    for dtype in (torch.float16, torch.float32):
        model = fully_shard(nn.Linear(1, 2, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        (model(torch.ones(1, 1)).sum() * 40000).backward()
        assert model.weight.grad.full_tensor().eq(40000).all()
    model = fully_shard(nn.Linear(1, 2, bias=False))
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.full_tensor().eq(world_size).all()


none("DeepSpeed", "`train_batch_size`, `train_micro_batch_size_per_gpu`", "batch_size")


@case("DeepSpeed", "`zero_allow_untested_optimizer`")
def unknown_optimizers(rank: int, world_size: int) -> None:
    class Mine(torch.optim.SGD):
        pass

    model = shard()
    Mine(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="elementwise=True"):
        fsdp2.local_optimizer(Mine, model.parameters(), lr=0.1)
    assert isinstance(fsdp2.local_optimizer(Mine, model.parameters(), elementwise=True, lr=0.1), Mine)


@case("DeepSpeed", "`activation_checkpointing`")
@case("Accelerate", "`activation_checkpointing=`")
def recomputation(rank: int, world_size: int) -> None:
    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()
            self.num_forwards = 0
            self.layers[1].register_forward_pre_hook(self.count)

        def count(self, *_: Any) -> None:
            self.num_forwards += 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Recomputes()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    same(rank, model, shard(), collectives=False)
    assert model.num_forwards == 2


@case("DeepSpeed", "`tensor_parallel: {autotp_size: ...}`", ranks=4)
@case("Accelerate", "`tp_size=`", ranks=4)
def tensor_parallel(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = stack()[:2], stack()[:2]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    group = mesh.get_local_rank("dp")  # the ranks of a tp group see the same data
    run(model, group)
    averaged(rank, 2, model, plain)
    assert model[0].weight.device_mesh.ndim == 2 and model[0].weight.to_local().numel() == DIM * DIM // 4


# --- from Accelerate --------------------------------------------------------------------------------------------------

none("Accelerate", "`fsdp_version=`", "version")


@case("Accelerate", "`reshard_after_forward=`")
def reshard_after_forward(rank: int, world_size: int) -> None:
    for value, gathers in ((True, 2 * LAYERS), (False, LAYERS)):
        theirs = stack()
        for child in theirs:
            torch_fsdp.fully_shard(child, reshard_after_forward=value)
        torch_fsdp.fully_shard(theirs, reshard_after_forward=value)
        ours = shard(reshard_after_forward=value)
        same(rank, ours, theirs)
        with events.record() as log:
            run(ours, rank)
        assert counts(log)["all_gather"] == gathers


@case("Accelerate", "`dp_replicate_size=`", "`dp_shard_size=`", ranks=4)
def replicas(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for options in ({"mesh": mesh}, {"zero": ZeroPolicy(3, shard_size=2)}):
        model = trains(rank, world_size, **options)
        assert model[0].weight.placements == (Replicate(), Shard(0))
    assert trains(rank, world_size).get_submodule("0").weight.to_local().shape == (DIM // 4, DIM)


@case("Accelerate", "`cp_size=`", ranks=4)
def context_parallel(rank: int, world_size: int) -> None:
    """Parameters are sharded, and gradients averaged, over both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = trains(rank, world_size, mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    assert model[0].weight.placements == (Shard(0),)
    assert tuple(model[0].weight.to_local().shape) == (DIM // 4, DIM)
