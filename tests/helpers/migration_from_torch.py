"""Cases of docs/migration.md: from torch's FSDP2 and from DDP. See `migration_cases`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import (
    ArgumentError,
    FSDPModule,
    MixedPrecisionPolicy,
    OrderError,
    ZeroPolicy,
    auto_shard,
    events,
    full_params,
    fully_shard,
    transformer_blocks,
)
from tests.helpers.migration_cases import (
    BF16,
    DIM,
    LAYERS,
    MICROBATCHES,
    TORCH_HAS_2_15,
    Net,
    averaged,
    case,
    counts,
    forward_prefetch,
    fsdp1,
    gradients,
    narrow_wire,
    none,
    quantised_weights,
    quiet,
    run,
    same,
    shard,
    stack,
    step_with_flag,
    torch_counts,
    units_of,
    weights,
)
from tests.helpers.parity_models import batch, full, mesh_2d
from tests.helpers.refused_by_torch import (
    Convolutions,
    Experts,
    PackedLinear,
    Scaled,
    Tied,
    packed_refused_by_torch,
    shard_in_order,
    tied_refused_by_torch,
)

# --- from FSDP2 -------------------------------------------------------------------------------------------------------


@case("FSDP2", "`reduce_dtype=None`")
def reduce_dtype_none(rank: int, world_size: int) -> None:
    seen: list[torch.dtype] = []
    for api in (fsdp2, torch_fsdp):
        model = api.fully_shard(stack(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
        model.set_all_reduce_hook(lambda grads: seen.append(grads.dtype))
        run(model, rank)
    assert seen == [torch.float32, torch.float32 if TORCH_HAS_2_15 else BF16]


@case("FSDP2", "when a unit's reduction starts")
def start_of_reductions(rank: int, world_size: int) -> None:
    model = shard()
    with events.record() as log:
        run(model, rank)
    order = [(event.kind, event.unit) for event in log]
    for unit in ("1", "2"):
        assert order.index(("reduce_scatter", unit)) < order.index(("post_backward", unit))


@case("FSDP2", "uneven `Shard(dim)` for dim > 0")
def uneven(rank: int, world_size: int) -> None:
    plain = nn.Linear(DIM - 3, DIM)
    with pytest.raises(NotImplementedError, match="uneven sharding"):
        torch_fsdp.fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    model = fully_shard(plain, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    model(torch.ones(1, DIM - 3)).sum().backward()
    assert tuple(model.weight.to_local().shape) == (DIM, 3 - rank)
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(DIM, DIM - 3))


@case("FSDP2", "trainable parameters of several dtypes in a unit")
def several_dtypes(rank: int, world_size: int) -> None:
    plain = Experts(torch.float64, torch.float32)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        torch_fsdp.fully_shard(copy.deepcopy(plain))(batch(0, rank))
    model = fully_shard(copy.deepcopy(plain))
    with events.record() as log:
        run(model, rank)
    assert sorted(str(e.dtype) for e in log if e.kind == "reduce_scatter") == ["torch.float32", "torch.float64"]
    averaged(rank, world_size, model, plain)


@case("FSDP2", "0-dim parameters")
def scalars(rank: int, world_size: int) -> None:
    plain = Scaled()
    with pytest.raises(ValueError, match="scalar"):
        torch_fsdp.fully_shard(copy.deepcopy(plain))
    model: Any = fully_shard(copy.deepcopy(plain))
    run(model, rank)
    assert model.scale.placements == (Replicate(),)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "channels_last and transposed parameters")
def strides(rank: int, world_size: int) -> None:
    plain = Convolutions()
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        torch_fsdp.fully_shard(copy.deepcopy(plain.second))
    model: Any = fully_shard(copy.deepcopy(plain))
    assert [param.stride() for param in model.parameters()] == [param.stride() for param in plain.parameters()]
    run(model, rank)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "a weight tied over two units")
def ties(rank: int, world_size: int) -> None:
    plain: Any = Tied()
    theirs, model = copy.deepcopy(plain), copy.deepcopy(plain)
    shard_in_order(torch_fsdp, theirs, "embed_head")
    assert theirs.embed.weight is not theirs.head.weight
    with tied_refused_by_torch():
        theirs(batch(0, rank))
    shard_in_order(fsdp2, model, "embed_head")
    assert model.embed.weight is model.head.weight
    run(model, rank)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "packed parameters (a subclass with attributes, bitsandbytes)")
def packed(rank: int, world_size: int) -> None:
    plain = PackedLinear(torch.uint8)
    with packed_refused_by_torch():
        torch_fsdp.fully_shard(copy.deepcopy(plain))(batch(0, rank))
    model = fully_shard(copy.deepcopy(plain))
    assert torch.equal(model(batch(0, rank)), plain(batch(0, rank)))


@case("FSDP2", "`copy.deepcopy` of a sharded module")
def copies(rank: int, world_size: int) -> None:
    with pytest.raises(AssertionError):
        copy.deepcopy(torch_fsdp.fully_shard(nn.Linear(2, 2)))
    model = shard()
    with CommDebugMode() as mode:
        other = copy.deepcopy(model)
    assert mode.get_total_counts() == 0 and other[0].weight is not model[0].weight
    same(rank, other, shard(), collectives=False)


@case("FSDP2", "`set_gradient_divide_factor` on gloo")
def divide_factor(rank: int, world_size: int) -> None:
    found = []
    for factor in (float(world_size), 3.0):
        model = fully_shard(stack())
        model.set_gradient_divide_factor(factor)
        run(model, rank)
        found.append(model[0].weight.grad.full_tensor())
    assert_close(found[0] * world_size / 3, found[1])
    theirs = torch_fsdp.fully_shard(stack())
    theirs.set_gradient_divide_factor(3.0)
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        run(theirs, rank)


@case("FSDP2", "`zero=ZeroPolicy(...)`")
def zero_argument(rank: int, world_size: int) -> None:
    assert "zero" not in inspect.signature(torch_fsdp.fully_shard).parameters
    model = shard(zero=ZeroPolicy(2))
    with events.record() as log:
        step_with_flag(model, rank)
    assert counts(log) == {"all_gather": LAYERS, "reduce_scatter": LAYERS * MICROBATCHES}


@case("FSDP2", "`MixedPrecisionPolicy(all_gather_dtype=torch.int8)`")
def int8_gather(rank: int, world_size: int) -> None:
    assert "all_gather_dtype" not in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    quantised_weights(rank, world_size)


@case("FSDP2", "`MixedPrecisionPolicy(reduce_scatter_dtype=torch.bfloat16)`")
def narrow_reduction(rank: int, world_size: int) -> None:
    assert "reduce_scatter_dtype" not in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    narrow_wire(rank, world_size)


@case("FSDP2", "`MixedPrecisionPolicy(param_dtype_override_fn=...)`")
def override(rank: int, world_size: int) -> None:
    has = "param_dtype_override_fn" in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    assert has == TORCH_HAS_2_15
    keep = lambda param: torch.float32 if param.ndim == 1 else None  # noqa: E731
    model = fully_shard(
        nn.Linear(DIM, DIM), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=keep)
    )
    model.unshard()
    assert (model.weight.dtype, model.bias.dtype) == (BF16, torch.float32)


@case("FSDP2", "`set_manual_backward_finalization`, `finalize_backward`")
def manual(rank: int, world_size: int) -> None:
    assert ("finalize_backward" in dir(torch_fsdp.FSDPModule)) == TORCH_HAS_2_15
    model = shard()
    model.set_manual_backward_finalization(True)
    with events.record() as log:
        run(model, rank)
    assert "reduce_scatter" not in counts(log)
    with events.record() as log:
        model.finalize_backward()
    assert counts(log) == {"reduce_scatter": LAYERS}
    averaged(rank, world_size, model, stack())


@case("FSDP2", "`set_keep_unsharded_storage`")
def kept_storage(rank: int, world_size: int) -> None:
    assert ("set_keep_unsharded_storage" in dir(torch_fsdp.FSDPModule)) == TORCH_HAS_2_15
    model = fully_shard(stack())
    model.set_keep_unsharded_storage(True)
    model.unshard()
    weight = model[0].weight
    address = weight.data_ptr()
    model.reshard()
    assert isinstance(model[0].weight, DTensor) and weight.data_ptr() == address
    assert weight.untyped_storage().nbytes() >= weight.nbytes


@case("FSDP2", "`set_auto_forward_prefetch`")
def auto_prefetch(rank: int, world_size: int) -> None:
    assert not any("auto_forward_prefetch" in name for name in dir(torch_fsdp.FSDPModule))
    forward_prefetch(rank, world_size)


@case("FSDP2", "choosing the units")
def chosen_units(rank: int, world_size: int) -> None:
    model = Net()
    assert units_of(auto_shard(model, transformer_blocks())) == ["blocks.0", "blocks.1", ""]
    assert all(isinstance(block, FSDPModule) for block in model.blocks)


@case("FSDP2", "whole parameters for a while")
@case("FSDP1", "`summon_full_params(module)`")
def summon(rank: int, world_size: int) -> None:
    model = shard()
    with full_params(model), torch.no_grad():
        ours = [param.shape for param in model.parameters()]
        model[0].weight[3] = 7
    assert model[0].weight.full_tensor()[3].eq(7).all()
    theirs = fsdp1()
    with quiet(), FullyShardedDataParallel.summon_full_params(theirs), torch.no_grad():
        assert [param.shape for param in theirs.parameters()] == ours
        next(theirs.parameters())[3] = 7
    same(rank, model, theirs)


@case("FSDP2", "an optimizer made before `fully_shard`")
def early_optimizer(rank: int, world_size: int) -> None:
    found = []
    for api in (fsdp2, torch_fsdp):
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        api.fully_shard(model)
        run(model, rank)
        before = weights(model)
        if api is fsdp2:
            with pytest.warns(UserWarning, match="parameters that fully_shard has replaced"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        found.append((model, optimizer, before))
    model, optimizer, before = found[0]
    fsdp2.adopt_optimizer(optimizer)
    optimizer.step()
    assert not torch.equal(model[0].weight.full_tensor(), before["0.weight"])


@case("FSDP2", "`clip_grad_norm_`", ranks=4)
def clipping(rank: int, world_size: int) -> None:
    one, other = shard(mesh=mesh_2d(2, 2)), shard(mesh=mesh_2d(2, 2))
    for model in (one, other):
        run(model, rank)
    with CommDebugMode() as mode:
        norm = fsdp2.clip_grad_norm_(one.parameters(), 1e-3)
    assert torch_counts(mode) == {"all_reduce": 1}
    assert_close(norm, full(torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3)))
    assert_close(gradients(one), gradients(other))


@case("FSDP2", "the optimizer's step")
@case("DeepSpeed", "`optimizer`, `scheduler`")
def local_step(rank: int, world_size: int) -> None:
    one, other = shard(), shard()
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, one.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    their_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    for model, optim in ((one, optimizer), (other, their_optimizer)):
        run(model, rank)
        optim.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@case("FSDP2", "`torch.distributed.pipelining`")
def pipelines(rank: int, world_size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    found = []
    for api in (fsdp2, torch_fsdp):
        part = nn.Sequential(stack()[rank])
        api.fully_shard(part, mesh=mesh["dp"])
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        x, losses = batch(0, 0).repeat(2, 1), []
        schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": losses} if rank else {}))
        found.append((part[0].weight.grad.full_tensor(), *losses))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@case("FSDP2", "forward after a backward that raised")
def failed_backward(rank: int, world_size: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ArithmeticError

    model = shard()
    hook = model[1].register_forward_hook(lambda module, args, out: Fails.apply(out))
    with pytest.raises(ArithmeticError):
        run(model, rank)
    hook.remove()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(batch(0, rank))
    model.reset_iter_state()
    model.zero_grad()
    run(model, rank)
    averaged(rank, world_size, model, stack())


@case("FSDP2", "user mistakes")
def mistakes(rank: int, world_size: int) -> None:
    for name, base in (
        ("ArgumentError", ValueError),
        ("MisuseError", AssertionError),
        ("OrderError", RuntimeError),
        ("UnsupportedError", NotImplementedError),
    ):
        assert issubclass(getattr(fsdp2, name), fsdp2.FSDPError) and issubclass(getattr(fsdp2, name), base)
    for api in (fsdp2, torch_fsdp):
        with pytest.raises(ValueError, match="ModuleList"):
            api.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ArgumentError):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


@none("FSDP2", "`module._get_fsdp_state()._fsdp_param_group`", "param_group")
def private_names(rank: int, world_size: int) -> None:
    assert "_fsdp_param_group" in dir(torch_fsdp.fully_shard(nn.Linear(2, 2))._get_fsdp_state())
    assert "_fsdp_param_group" not in dir(fully_shard(nn.Linear(2, 2))._get_fsdp_state())


# --- from DDP ---------------------------------------------------------------------------------------------------------
