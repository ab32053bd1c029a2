"""Cases of docs/migration.md: from FSDP1. See `migration_cases`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ZeroPolicy,
    auto_shard,
    by_class,
    by_predicate,
    by_size,
    events,
    full_params,
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
    gradients,
    narrow_wire,
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
from tests.helpers.migration_from_torch import (
    accumulate_like,
    custom_reduction,
    nothing_is_sent,
    override,
    zero_argument,
)
from tests.helpers.parity_models import batch, mesh_2d

# --- from FSDP1: the constructor --------------------------------------------------------------------------------------


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


# --- from FSDP1: mixed precision --------------------------------------------------------------------------------------


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


# --- from FSDP1: wrapping ---------------------------------------------------------------------------------------------


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


# --- from FSDP1: states -----------------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def their_state(kind: str) -> dict[str, Any]:
    model = fsdp1()
    with quiet(), FullyShardedDataParallel.state_dict_type(model, torch_fsdp.StateDictType[kind]):
        return model.state_dict()


none("FSDP1", "`state_dict_type`, `set_state_dict_type`, `get_state_dict_type`", "state_dict_type")


@case("FSDP1", "`SHARDED_STATE_DICT`")
def sharded_states(rank: int, world_size: int) -> None:
    model, theirs = shard(), their_state("SHARDED_STATE_DICT")
    with CommDebugMode() as mode:
        ours = model.state_dict()
    assert mode.get_total_counts() == 0 and list(ours) == list(theirs)
    for name, value in ours.items():
        local = theirs[name].local_shards()[0].tensor
        assert torch.equal(value.to_local(), local)


@case("FSDP1", "`FULL_STATE_DICT`")
def full_states(rank: int, world_size: int) -> None:
    model, theirs = shard(), their_state("FULL_STATE_DICT")
    with full_params(model, write_back=False):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    for ours in (inside, get_model_state_dict(model, options=FULL)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@case("FSDP1", "`FullStateDictConfig(rank0_only=True, offload_to_cpu=True)`")
@case("Accelerate", "`accelerator.get_state_dict(model)`")
def full_states_on_rank_0(rank: int, world_size: int) -> None:
    """With this config FSDP1 of torch 2.13 crashes on CPU parameters, so it is not asked."""
    model, plain = shard(), stack().state_dict()
    ours = get_model_state_dict(model, options=FULL_ON_CPU)
    assert list(ours) == (list(plain) if rank == 0 else [])
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())
    with full_params(model, write_back=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model[0].weight, DTensor) == (rank != 0)


@case("FSDP1", "`LOCAL_STATE_DICT`")
def local_states(rank: int, world_size: int) -> None:
    ours = {name: value.to_local() for name, value in shard().state_dict().items()}
    theirs = their_state("LOCAL_STATE_DICT")
    for name, value in ours.items():  # one parameter a unit, so the flat ones are cut at the same places
        assert torch.equal(value.flatten(), theirs[name])


def trained(rank: int) -> tuple[Any, torch.optim.Optimizer]:
    model = shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(model, rank)
    optimizer.step()
    return model, optimizer


@case("FSDP1", "`optim_state_dict`, `sharded_optim_state_dict`")
@case("FSDP1", "`rekey_optim_state_dict`")
def optimizer_states(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert list(states) == ["0.weight", "1.weight", "2.weight"]
    assert states["0.weight"]["exp_avg"].placements == (Shard(0),)


@case("FSDP1", "`full_optim_state_dict`")
@case(
    "FSDP1",
    "`optim_state_dict_to_load`, `shard_full_optim_state_dict`, `scatter_full_optim_state_dict`, "
    "`flatten_sharded_optim_state_dict`",
)
def full_optimizer_states(rank: int, world_size: int) -> None:
    """What FSDP1 of torch 2.13 makes of Adam's state on CPU parameters is wrong, so it is not asked."""
    model, optimizer = trained(rank)
    states = get_optimizer_state_dict(model, optimizer, options=FULL)
    for state, gradient in zip(states["state"].values(), gradients(model), strict=True):
        assert_close(state["exp_avg"], 0.1 * gradient)
    other = shard()
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    set_optimizer_state_dict(other, fresh, states, options=FULL)
    assert torch.equal(
        fresh.state[other[0].weight]["exp_avg"].to_local(), optimizer.state[model[0].weight]["exp_avg"].to_local()
    )


@case("Accelerate", "`state_dict_type=`")
def state_dict_types(rank: int, world_size: int) -> None:
    sharded_states(rank, world_size)
    full_states(rank, world_size)


@case("Accelerate", "`state_dict_config=`, `optim_state_dict_config=`")
def state_dict_configs(rank: int, world_size: int) -> None:
    full_states_on_rank_0(rank, world_size)
    full_optimizer_states(rank, world_size)


# --- from FSDP1: methods ----------------------------------------------------------------------------------------------


def summon_both(rank: int, look: Callable[[Any], Any], ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
    """What `look` finds in both models in their contexts, after a backward."""
    found = []
    model, other = shard(), fsdp1()
    for each in (model, other):
        with quiet():
            run(each, rank)
    with full_params(model, **ours), torch.no_grad():
        found.append(look(list(model.parameters())))
    with quiet(), FullyShardedDataParallel.summon_full_params(other, **theirs), torch.no_grad():
        found.append(look(list(other.parameters())))
    assert found[0] == found[1]
    return model, other


@case("FSDP1", "`summon_full_params(recurse=False)`")
def summon_one(rank: int, world_size: int) -> None:
    """Theirs, when it is asked for the root alone, leaves the wrapped blocks sharded, too."""
    ours, theirs = Net(), fsdp1(Net(), auto_wrap_policy=torch_wrap.ModuleWrapPolicy({Net.Block}))
    auto_shard(ours, by_class(Net.Block))
    with full_params(ours, recurse=False):
        mine = {name: not isinstance(param, DTensor) for name, param in ours.named_parameters()}
    assert [name for name, whole in mine.items() if whole] == ["head.weight", "head.bias"]
    with quiet(), FullyShardedDataParallel.summon_full_params(theirs, recurse=False):
        for (name, whole), param, like in zip(mine.items(), theirs.parameters(), Net().parameters(), strict=True):
            if name in ("blocks.0.large.weight", "blocks.1.large.weight", "head.weight"):  # no rank has all of these
                assert whole == (param.shape == like.shape), name


@case("FSDP1", "`summon_full_params(writeback=False)`")
@case("DeepSpeed", "`deepspeed.zero.GatheredParameters(params)`")
def summon_without_writing(rank: int, world_size: int) -> None:
    fill = lambda params: params[0].fill_(3).shape  # noqa: E731
    model, _ = summon_both(rank, fill, {"write_back": False}, {"writeback": False})
    assert not model[0].weight.full_tensor().eq(3).any()
    assert torch.equal(weights(model)["0.weight"], stack()[0].weight)


@case("FSDP1", "`summon_full_params(rank0_only=True)`")
def summon_on_rank_0(rank: int, world_size: int) -> None:
    def look(params: list[Tensor]) -> bool:
        return not isinstance(params[0], DTensor) and params[0].shape == (DIM, DIM)

    options = {"rank0_only": True}
    summon_both(rank, look, {**options, "write_back": False}, {**options, "writeback": False})
    from_the_first(rank, world_size)


@case("DeepSpeed", "`deepspeed.zero.GatheredParameters(params, modifier_rank=0)`")
def from_the_first(rank: int, world_size: int) -> None:
    """What rank 0 writes goes to all ranks."""
    model = shard()
    with full_params(model, rank0_only=True), torch.no_grad():
        if rank == 0:
            model[0].weight.fill_(5)
    assert model[0].weight.to_local().eq(5).all() and not model[1].weight.to_local().eq(5).any()


@case("FSDP1", "`summon_full_params(offload_to_cpu=True)`")
def summon_in_host_memory(rank: int, world_size: int) -> None:
    devices = lambda params: [param.device.type for param in params]  # noqa: E731
    summon_both(rank, devices, {"offload_to_cpu": True}, {"offload_to_cpu": True})


@case("FSDP1", "`summon_full_params(with_grads=True)`")
def summon_gradients(rank: int, world_size: int) -> None:
    look = lambda params: [param.grad.shape for param in params]  # noqa: E731
    model, other = summon_both(rank, look, {"with_grads": True}, {"with_grads": True})
    for mine, theirs in zip(gradients(model), gradients(other), strict=True):
        assert_close(mine, theirs)


@case("FSDP1", "`model.clip_grad_norm_(max_norm)`")
@case("Accelerate", "`accelerator.clip_grad_norm_`")
@case("DeepSpeed", "`gradient_clipping`")
def clips(rank: int, world_size: int) -> None:
    model, other = shard(), fsdp1()
    run(model, rank)
    with quiet():
        run(other, rank)
        theirs = other.clip_grad_norm_(1e-3)
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 1e-3), theirs)
    for mine, clipped in zip(gradients(model), gradients(other), strict=True):
        assert_close(mine, clipped)


@case("FSDP1", "`with model.no_sync():`")
@case("Accelerate", "`accelerator.accumulate(model)`")
@case("DeepSpeed", "`engine.no_sync()`")
def no_sync(rank: int, world_size: int) -> None:
    accumulate_like(rank, shard(), fsdp1())


@case("FSDP1", "`register_comm_hook`")
def hooks(rank: int, world_size: int) -> None:
    model = shard()
    model[0].set_all_reduce_hook(lambda grads: grads.mul_(2))
    run(model, rank)
    plain = shard()
    run(plain, rank)
    assert_close(gradients(model)[0], 2 * gradients(plain)[0])
    assert_close(gradients(model)[1], gradients(plain)[1])
    custom_reduction(rank, world_size)
    reduce_dtype(rank, world_size)
    narrow_wire(rank, world_size)


@case("FSDP1", "`apply`")
def applies(rank: int, world_size: int) -> None:
    def centre(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            nn.init.orthogonal_(module.weight)

    shapes: list[Any] = []
    model, other = shard(), fsdp1()
    torch.manual_seed(1)
    with full_params(model):
        model.apply(centre)
    torch.manual_seed(1)
    with quiet():
        other.apply(centre)
    assert shapes == 2 * LAYERS * [(DIM, DIM)]
    same(rank, model, other)


@case("FSDP1", "`fsdp_modules`")
def list_of_units(rank: int, world_size: int) -> None:
    with quiet():
        theirs = FullyShardedDataParallel.fsdp_modules(fsdp1())
    assert len([m for m in shard().modules() if isinstance(m, FSDPModule)]) == len(theirs) == LAYERS + 1


none("FSDP1", "`check_is_root`", "is_root")
