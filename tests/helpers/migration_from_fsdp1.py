"""Cases of docs/migration.md: from FSDP1. See `migration_cases`."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ZeroPolicy,
    auto_shard,
    by_class,
    by_predicate,
    by_size,
    events,
    fully_shard,
    transformer_blocks,
)
from tests.helpers.migration_cases import (
    BF16,
    DIM,
    LAYERS,
    Net,
    case,
    fsdp1,
    none,
    order_of_gathers,
    our_units,
    quiet,
    run,
    same,
    shard,
    stack,
    their_units,
    trains,
    units_of,
    weights,
)
from tests.helpers.migration_from_ddp import nothing_is_sent
from tests.helpers.migration_from_torch import override, zero_argument
from tests.helpers.parity_models import batch, mesh_2d


@case("FSDP1", "`module=`")
def in_place(rank: int, world_size: int) -> None:
    plain = stack()
    assert shard(plain) is plain
    same(rank, plain, fsdp1())


@case("FSDP1", "`process_group=`", "`device_mesh=`")
def groups(rank: int, world_size: int) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    same(rank, shard(mesh=mesh), fsdp1(process_group=dist.group.WORLD))
    same(rank, shard(mesh=mesh), fsdp1(device_mesh=mesh))
    pair = mesh_2d(1, 2)
    both = (pair.get_group("shard"), pair.get_group("replicate"))
    theirs = fsdp1(process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    ours = shard(mesh=DeviceMesh.from_group([*both[::-1]], "cpu", pair.mesh, mesh_dim_names=("replicate", "shard")))
    same(rank, ours, theirs, collectives=False)


def strategy(rank: int, name: str, *ours: dict[str, Any], mesh: DeviceMesh | None = None) -> None:
    for options in ours:
        same(rank, shard(**options), fsdp1(sharding_strategy=ShardingStrategy[name], device_mesh=mesh))


@case("FSDP1", "`FULL_SHARD`")
def full_shard(rank: int, world_size: int) -> None:
    strategy(rank, "FULL_SHARD", {"reshard_after_forward": True}, {"zero": ZeroPolicy(3)})


@case("FSDP1", "`SHARD_GRAD_OP`")
def shard_grad_op(rank: int, world_size: int) -> None:
    strategy(rank, "SHARD_GRAD_OP", {"reshard_after_forward": False}, {"zero": ZeroPolicy(2)})
    zero_argument(rank, world_size)


@case("FSDP1", "`NO_SHARD`")
def no_shard(rank: int, world_size: int) -> None:
    strategy(rank, "NO_SHARD", {"zero": ZeroPolicy(0)})


@case("FSDP1", "`HYBRID_SHARD`", ranks=4)
def hybrid_shard(rank: int, world_size: int) -> None:
    options = {"mesh": mesh_2d(2, 2), "reshard_after_forward": True}
    strategy(rank, "HYBRID_SHARD", options, {"zero": ZeroPolicy(3, shard_size=2)}, mesh=mesh_2d(2, 2))


@case("FSDP1", "`_HYBRID_SHARD_ZERO2`", ranks=4)
def hybrid_shard_zero2(rank: int, world_size: int) -> None:
    options = {"mesh": mesh_2d(2, 2), "reshard_after_forward": False}
    strategy(rank, "_HYBRID_SHARD_ZERO2", options, {"zero": ZeroPolicy(2, shard_size=2)}, mesh=mesh_2d(2, 2))


@case("FSDP1", "`sharding_strategy=`")
@case("Accelerate", "`sharding_strategy=`")
def strategies(rank: int, world_size: int) -> None:
    full_shard(rank, world_size)
    shard_grad_op(rank, world_size)


@case("FSDP1", "`cpu_offload=CPUOffload(offload_params=True)`")
@case("Accelerate", "`cpu_offload=`")
@case("DeepSpeed", "`offload_param: {device: cpu}`", "`offload_optimizer: {device: cpu}`")
def offload(rank: int, world_size: int) -> None:
    """FSDP1 cannot offload without an accelerator; on the CPU what is checked is where things are, and the values."""
    model = trains(rank, world_size, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    assert {tensor.to_local().device.type for tensor in [*model.parameters(), *grads, *states]} == {"cpu"}


@case("FSDP1", "`auto_wrap_policy=`")
@case("DeepSpeed", "`deepspeed.initialize(model=..., config=...)`")
def auto_wrapped(rank: int, world_size: int) -> None:
    ours = stack()
    assert units_of(auto_shard(ours, by_class(nn.Linear), reshard_after_forward=True)) == ["0", "1", "2", ""]
    same(rank, ours, fsdp1())


@case("FSDP1", "`backward_prefetch=BACKWARD_PRE`", "`limit_all_gathers=True`")
@none("FSDP1", "`backward_prefetch=BACKWARD_POST`, `None`", "backward_post")
@case("Accelerate", "`backward_prefetch=`", "`limit_all_gathers=`")
@case("DeepSpeed", "`overlap_comm`")
def backward_prefetch(rank: int, world_size: int) -> None:
    """The next unit is gathered before this one computes, and no further one."""
    ours = shard(reshard_after_forward=True)
    loss = ours(batch(0, rank)).square().mean()
    with events.record() as log:
        loss.backward()
    found = order_of_gathers(log, "all_gather", "post_backward")
    assert found[:4] == ["all_gather 2", "all_gather 1", "post_backward 2", "all_gather 0"]
    ours[2].set_modules_to_backward_prefetch([ours[1], ours[0]])
    with events.record() as log:
        run(ours, rank)
    found = order_of_gathers(log, "all_gather", "post_backward")[LAYERS:]
    assert found[:4] == ["all_gather 2", "all_gather 1", "all_gather 0", "post_backward 2"]


@case("FSDP1", "`ignored_modules=`", "`ignored_states=`")
@case("Accelerate", "`ignored_modules=`")
def ignored(rank: int, world_size: int) -> None:
    theirs, ours = stack(), stack()
    params = {param for module in (ours[1],) for param in module.parameters()}
    fully_shard(ours, ignored_params=params)
    same(rank, ours, fsdp1(theirs, ignored_modules=[theirs[1]], auto_wrap_policy=None))
    assert type(ours[1].weight) is nn.Parameter and isinstance(ours[0].weight, DTensor)


@case("FSDP1", "`param_init_fn=`")
@case("Accelerate", "`param_init_fn=`")
@case("DeepSpeed", "`deepspeed.zero.Init()`")
def from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        ours = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    shard(ours)
    assert ours[0].weight.is_meta
    ours.to_empty(device="cpu")
    nn.init.constant_(ours[0].weight, 0.5)
    with torch.device("meta"):
        theirs = nn.Sequential(nn.Linear(DIM, DIM, bias=False))

    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    same(rank, ours, fsdp1(theirs, param_init_fn=initialise))
    assert ours[0].weight.to_local().shape == (DIM // world_size, DIM)


@case("FSDP1", "`device_id=`")
def device(rank: int, world_size: int) -> None:
    model = shard(mesh=init_device_mesh("cpu", (world_size,)))
    assert {param.to_local().device.type for param in model.parameters()} == {"cpu"}
    assert model[0].weight.device_mesh.device_type == "cpu"


@none("FSDP1", "`sync_module_states=True`", "sync_module", "broadcast")
@none("Accelerate", "`sync_module_states=`", "sync_module", "broadcast")
@case("Accelerate", "`cpu_ram_efficient_loading=`")
def from_rank_0(rank: int, world_size: int) -> None:
    """Only rank 0 has values; after loading all ranks have their rows of them."""
    nothing_is_sent(rank, world_size)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))
    shard(model).to_empty(device="cpu")
    values = stack().state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)
    assert all(torch.equal(value, values[name]) for name, value in weights(model).items())


@none("FSDP1", "`limit_all_gathers=False`", "limit")
@none("DeepSpeed", "`stage3_max_live_parameters`", "max_live", "live_param")
def two_units(rank: int, world_size: int) -> None:
    """Never more than two units are whole."""
    model = shard(reshard_after_forward=True)
    with events.record() as log:
        run(model, rank)
    alive, most = 0, 0
    for event in log:
        if event.unit:
            alive += {"unshard": 1, "reshard": -1}.get(event.kind, 0)
            most = max(most, alive)
    assert most == 2 and alive == 0


none("FSDP1", "`use_orig_params=False`", "orig_params", "flat")


def mixed(rank: int, theirs: MixedPrecision, ours: MixedPrecisionPolicy) -> Any:
    """Both in mixed precision: equal up to rounding; returns ours, and how each layer's inputs looked in both."""
    found = []
    for model in (shard(mp_policy=ours), fsdp1(mixed_precision=theirs)):
        seen: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda module, args, seen=seen: seen.append((args[0].dtype, module.weight.dtype))
                )
        found.append((model, seen))
    (mine, mine_saw), (other, other_saw) = found
    same(rank, mine, other, collectives=False, tolerance=3e-2)
    assert mine_saw == other_saw
    assert {p.grad.dtype for p in mine.parameters()} == {p.grad.dtype for p in other.parameters() if p.grad is not None}
    return mine


@case("FSDP1", "`mixed_precision=`", "`MixedPrecision(param_dtype=...)`")
@case("Accelerate", "`mixed_precision_policy=`")
@case("DeepSpeed", "`bf16: {enabled: true}`")
def param_dtype(rank: int, world_size: int) -> None:
    theirs = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    model = mixed(rank, theirs, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    assert {param.dtype for param in model.parameters()} == {torch.float32}, "the master weights"
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "all_gather"} == {BF16}


@case("FSDP1", "`MixedPrecision(reduce_dtype=...)`")
@case("DeepSpeed", "`communication_data_type`")
def reduce_dtype(rank: int, world_size: int) -> None:
    model = mixed(rank, MixedPrecision(reduce_dtype=BF16), MixedPrecisionPolicy(reduce_dtype=BF16))
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {torch.float32}


@none("FSDP1", "`MixedPrecision(buffer_dtype=...)`", "buffer_dtype")
def buffer_dtypes(rank: int, world_size: int) -> None:
    model = fully_shard(nn.BatchNorm1d(DIM), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.running_mean = model.running_mean.to(BF16)
    model.unshard()
    assert (model.weight.dtype, model.running_mean.dtype, model.running_var.dtype) == (BF16, BF16, torch.float32)


@none("FSDP1", "`MixedPrecision(keep_low_precision_grads=True)`", "low_precision", "keep_grad")
def gradient_dtypes(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, BF16):
        model = shard(stack().to(dtype), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        run(model, rank)
        assert {param.grad.dtype for param in model.parameters()} == {dtype}


@case("FSDP1", "`MixedPrecision(cast_forward_inputs=...)`", "`MixedPrecision(cast_root_forward_inputs=...)`")
def input_casts(rank: int, world_size: int) -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(x.dtype)
            return x.float() * self.weight.float()

    for root_casts, inner_casts in itertools.product([True, False], repeat=2):
        dtypes: list[torch.dtype] = []
        ours, theirs = nn.Sequential(Sees(), Sees()), nn.Sequential(Sees(), Sees())
        for child in ours:
            fully_shard(child, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=inner_casts))
        fully_shard(ours, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=root_casts))
        precision = MixedPrecision(BF16, cast_forward_inputs=inner_casts, cast_root_forward_inputs=root_casts)
        policy = torch_wrap.ModuleWrapPolicy({Sees})
        ours(batch(0, rank))
        with quiet():
            fsdp1(theirs, mixed_precision=precision, auto_wrap_policy=policy)(batch(0, rank))
        assert dtypes[:2] == dtypes[2:], (root_casts, inner_casts)


@case("FSDP1", "`MixedPrecision(_module_classes_to_ignore=...)`")
def batch_norm_apart(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    fully_shard(model[1])
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model)
    seen: list[Any] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, args[0].dtype)))
    run(model, rank)
    assert seen == [(torch.float32, BF16)] and model[1].weight.grad is not None
    override(rank, world_size)


@case("FSDP1", "`always_wrap_policy`")
def wrap_all(rank: int, world_size: int) -> None:
    ours = our_units(by_predicate(lambda fqn, module: True))
    theirs = their_units(torch_wrap.always_wrap_policy)
    assert "blocks" in theirs, "FSDP1 wraps a ModuleList, which has no forward"
    # FSDP1 also wraps modules whose parameters are all wrapped below.
    assert ours == [name for name in theirs if name not in ("blocks", "blocks.0", "blocks.1")]


@case("FSDP1", "`lambda_auto_wrap_policy`")
def wrap_by_function(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Net.Block))
    assert our_units(by_predicate(lambda fqn, module: isinstance(module, Net.Block))) == their_units(theirs)


@case("FSDP1", "`transformer_auto_wrap_policy`")
@case("Accelerate", '`auto_wrap_policy="transformer_based_wrap"`')
def wrap_transformers(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Net.Block})
    assert our_units(by_class(Net.Block)) == our_units(transformer_blocks()) == their_units(theirs)


@case("FSDP1", "`size_based_auto_wrap_policy`")
@case("Accelerate", '`auto_wrap_policy="size_based_wrap"`', "`min_num_params=`")
@case("DeepSpeed", "`stage3_module_granularity_threshold`, `leaf_module`, `set_z3_leaf_modules`")
def wrap_by_size(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=4 * DIM * DIM)
    assert our_units(by_size(4 * DIM * DIM)) == their_units(theirs) == ["blocks.0.large", "blocks.1.large"]
    leaf = Net()
    for block in leaf.blocks:  # one unit each, whatever is below
        fully_shard(block)
    fully_shard(leaf)
    with events.record() as log:
        run(leaf, rank)
    assert sum(event.kind == "all_gather" and "blocks" in event.unit for event in log) == 4


@case("FSDP1", "`ModuleWrapPolicy`")
@case("Accelerate", "`transformer_cls_names_to_wrap=`")
def wrap_by_class(rank: int, world_size: int) -> None:
    assert our_units(by_class(Net.Block)) == our_units(by_class("Block"))
    assert our_units(by_class(Net.Block)) == their_units(torch_wrap.ModuleWrapPolicy({Net.Block}))


@case("FSDP1", "`CustomPolicy`")
def wrap_with_options(rank: int, world_size: int) -> None:
    def ours(fqn: str, module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if isinstance(module, Net.Block) else False

    def theirs(module: nn.Module) -> Any:
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Net.Block) else False

    assert our_units(by_predicate(ours)) == their_units(torch_wrap.CustomPolicy(theirs))
    model = Net()
    auto_shard(model, by_predicate(ours), reshard_after_forward=True)
    with events.record() as log:
        run(model, rank)
    found = Counter(event.unit for event in log if event.kind == "all_gather")
    assert found == {"blocks.0": 1, "blocks.1": 1, "": 2}


none("FSDP1", "`enable_wrap`", "enable_wrap")


@case("FSDP1", "`wrap`")
@case("Accelerate", '`auto_wrap_policy="no_wrap"`')
def wrap_one(rank: int, world_size: int) -> None:
    same(rank, fully_shard(stack()), fsdp1(auto_wrap_policy=None))


none("FSDP1", "`check_is_root`", "is_root")
