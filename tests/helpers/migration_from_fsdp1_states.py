"""What docs/migration.md says of FSDP1's state dicts, and of its methods: the cases of these rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import (
    FSDPModule,
    auto_shard,
    by_class,
    full_params,
)
from tests.helpers.migration_cases import (
    DIM,
    LAYERS,
    Net,
    case,
    fsdp1,
    gradients,
    narrow_wire,
    none,
    quiet,
    run,
    same,
    shard,
    stack,
    weights,
)
from tests.helpers.migration_from_ddp import accumulate_like, custom_reduction
from tests.helpers.migration_from_fsdp1 import reduce_dtype

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
