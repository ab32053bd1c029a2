"""Tensor parallelism first, then `fully_shard` on the other axes of the mesh (Behaviour 158-162)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing import assert_close

import fsdp2
from tests.helpers.parity_models import full, local, mean_gradients, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    API,
    DIM,
    PLANS,
    TpLm,
    assert_tp_gradients,
    check_step,
    count_comms,
    data_rank,
    data_ranks,
    dp_tp,
    hsdp_tp,
    mesh_of,
    ours_only,
    parallelize,
    placements_after,
    quiet,
    token_batch,
    tokens,
    tp_race,
    tp_shard,
)

every_plan = pytest.mark.parametrize("plan", PLANS)
every_raf = pytest.mark.parametrize("raf", [True, False, None])


def sharded(mesh: DeviceMesh | None = None, plan: str = "plain_norms", **options: Any) -> tuple[TpLm, Any]:
    """The plain model and a copy with TP and `fully_shard`."""
    plain = TpLm()
    return plain, tp_shard(API, copy.deepcopy(plain), mesh, plan, **options)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Unlike Adam it does not make large differences from small ones."""
    return torch.optim.SGD(params, lr=0.1)


def error_of(call: Any, *args: Any, **kwargs: Any) -> Exception | None:
    """What the call raised."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None


# --- form -------------------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("size", [8, 3, 5, 17])
def test_sharded_parameters(rank: int, world_size: int, size: int) -> None:
    """Behaviour 158: placements and local shapes over ("dp", "tp"); `full_tensor` restores also what divides by
    nothing."""
    mesh = dp_tp()
    model: Any = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.LayerNorm(size))
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = {name: (param.shape, param.stride()) for name, param in model.named_parameters()}
    API.fully_shard(model, mesh=mesh["dp"])
    expected: dict[str, tuple[Placement, ...]] = {
        "0.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "0.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "1.weight": (Shard(0), Shard(1)),
        "1.bias": (Shard(0), Replicate()),
        "2.weight": (Shard(0),),
        "2.bias": (Shard(0),),
    }
    for name, param in model.named_parameters():
        value = plain.get_parameter(name)
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor) and param.is_leaf, name
        assert param.placements == expected[name], name
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")[: len(expected[name])], name
        assert (param.shape, param.stride()) == before[name], name
        assert torch.equal(param.to_local(), shard_like(value, param)), name
        assert param.to_local().is_contiguous(), name
        assert torch.equal(param.full_tensor(), value), name


@on_ranks(4)
@pytest.mark.parametrize("size", [8, 3, 17])
def test_unsharded_parameters(rank: int, world_size: int, size: int) -> None:
    """Behaviour 24, 25, 160: DTensors on the TP mesh alone, as TP left them; plain ones plain; each object for life."""
    mesh = dp_tp()
    model: Any = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.LayerNorm(size))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = {name: local(param.detach()).clone() for name, param in model.named_parameters()}
    form = {
        name: (param.device_mesh, param.placements, param.shape, param.stride())
        for name, param in model.named_parameters()
        if isinstance(param, DTensor)
    }
    assert len(form) == 4
    API.fully_shard(model, mesh=mesh["dp"])
    in_shards = dict(model.named_parameters())
    model.unshard()
    unsharded = dict(model.named_parameters())
    for name, param in unsharded.items():
        assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad, name
        assert isinstance(param, DTensor) == (name in form), name
        if isinstance(param, DTensor):
            assert (param.device_mesh, param.placements, param.shape, param.stride()) == form[name], name
        assert torch.equal(local(param.detach()), before[name]), name
    model.reshard()
    assert all(param is in_shards[name] for name, param in model.named_parameters())
    in_shards["0.weight"].requires_grad_(False)
    model.unshard()
    assert all(param is unsharded[name] for name, param in model.named_parameters())
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["0.weight"]
    for name, param in model.named_parameters():
        assert torch.equal(local(param.detach()), before[name]), name
    model.reshard()


@on_ranks(4)
@every_plan
def test_inside_forward(rank: int, world_size: int, plan: str) -> None:
    """Behaviour 158, 160: what the model's parameters are before, during and after forward."""
    mesh = dp_tp()
    _, model = sharded(plan=plan, reshard_after_forward=True)
    seen: list[tuple[tuple[str, ...], tuple[Placement, ...]] | None] = []
    weights = {name: model.blocks[0].get_submodule(name) for name in ("norm", "up", "down")}

    def look(*args: Any) -> None:
        for module in weights.values():
            weight = module.weight
            form = (weight.device_mesh.mesh_dim_names, weight.placements) if isinstance(weight, DTensor) else None
            seen.append(form)

    weights["up"].register_forward_hook(look)
    with quiet():
        model(tokens(0, data_rank(mesh)))
    assert seen == [
        None if plan == "plain_norms" else (("tp",), (Replicate(),)),
        (("tp",), (Shard(0),)),
        (("tp",), (Shard(1),)),
    ]
    for name, param in model.named_parameters():
        assert param.placements == placements_after(name, plan), name
        assert param.device_mesh == (mesh["dp"] if len(param.placements) == 1 else mesh), name


@on_ranks(4)
@every_plan
@pytest.mark.parametrize(("raf", "gathers"), [(True, 6), (None, 5), (False, 3)])
def test_numbers_of_collectives(rank: int, world_size: int, plan: str, raf: bool | None, gathers: int) -> None:
    """Behaviour 132, 160: one all-gather and one reduce-scatter a unit, DTensors or not."""
    _, model = sharded(plan=plan, reshard_after_forward=raf)
    for step in range(2):
        with count_comms() as counts:
            token_batch(model, step, data_rank(dp_tp()))
        assert counts == {"all_gather": gathers, "reduce_scatter": 3, "all_reduce": 0}


@on_ranks(4)
@ours_only("it has no events")
def test_sizes_of_collectives(rank: int, world_size: int) -> None:
    """Behaviour 23: the shards over dp of what TP left on this rank travel, padded, over the dp axis only."""
    parts = [local(param) for param in parallelize(TpLm(), dp_tp()["tp"]).get_submodule("blocks.0").parameters()]
    padded = sum(-(-part.shape[0] // 2) * part[0:1].numel() for part in parts)
    _, model = sharded()
    with fsdp2.events.record() as log:
        token_batch(model, 0, data_rank(dp_tp()))
    assert {(e.kind, e.numel, e.group_size) for e in log if e.group_size and e.unit == "blocks.0"} == {
        ("all_gather", 2 * padded, 2),
        ("reduce_scatter", padded, 2),
    }


# --- training ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
@every_plan
def test_gradients(rank: int, world_size: int, plan: str) -> None:
    """Behaviour 26, 158: gradients lie as the parameters do, and are those of one process on all batches."""
    plain, model = sharded(plan=plan)
    with quiet():
        check_step(model, plain, dp_tp())


@on_ranks(4)
@every_plan
@every_raf
def test_training(rank: int, world_size: int, plan: str, raf: bool | None) -> None:
    """Behaviour 158, 176: several Adam steps, bit by bit as torch's FSDP2, and close to one process."""
    tp_race(dp_tp(), plan=plan, reshard_after_forward=raf, exact=True).run(3)


@on_ranks(2)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@every_plan
def test_axes_of_one_rank(rank: int, world_size: int, sizes: tuple[int, int], plan: str) -> None:
    """Behaviour 133, 158: an axis of one rank, whichever it is, is an axis like others."""
    tp_race(dp_tp(*sizes), plan=plan, exact=True).run(2)


@on_ranks(4)
@pytest.mark.parametrize("use_reentrant", [False, True])
@every_plan
def test_activation_checkpointing(rank: int, world_size: int, use_reentrant: bool, plan: str) -> None:
    """Behaviour 118, 175: recomputation gathers nothing again, and computes the same."""
    mesh = dp_tp()
    model: Any = tp_race(
        mesh, lambda: TpLm(use_reentrant=use_reentrant), plan=plan, reshard_after_forward=True, exact=True
    ).run(2)
    with count_comms() as counts:
        token_batch(model, 5, data_rank(mesh))
    assert counts == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 0}


@on_ranks(4)
@every_plan
@every_raf
def test_mixed_precision(rank: int, world_size: int, plan: str, raf: bool | None) -> None:
    """Behaviour 113, 114, 116: bf16 on the TP mesh for computation, fp32 for reduction, shards and gradients."""
    mesh = dp_tp()

    def shard(api: Any, model: nn.Module) -> Any:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return tp_shard(api, model, mesh, plan, mp_policy=policy, reshard_after_forward=raf)

    # Gradients that are Partial over tp are summed over it in bf16 by torch, in either dtype by us: close, not equal.
    exact = plan == "plain_norms"
    model: Any = tp_race(mesh, shard=shard, plain=False, exact=exact, rtol=0.05, by_norm=True, optim=sgd).run(3)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model.unshard()
    assert {param.dtype for name, param in model.named_parameters() if "blocks" not in name} == {torch.bfloat16}
    model.reshard()
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert (weight.dtype, weight.to_local().dtype) == (torch.bfloat16, torch.bfloat16)
    model.blocks[0].reshard()
    plain = TpLm()
    model = shard(API, copy.deepcopy(plain))
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    expected = mean_gradients(plain, data_ranks(mesh), lambda m, r: token_batch(m, 0, r))
    assert_tp_gradients(model, expected, rtol=0.1, atol=0.01)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
def test_gradient_accumulation(rank: int, world_size: int, plan: str, keep: bool) -> None:
    """Behaviour 96, 97: three microbatches, reduced with the last; nothing travels before."""
    mesh = dp_tp()

    def backward(model: Any, step: int, batch_rank: int) -> Tensor:
        loss = torch.zeros(())
        for micro in range(3):
            if isinstance(model, (API.FSDPModule, fsdp2.FSDPModule)):
                model.set_requires_gradient_sync(micro == 2)
                if keep:
                    model.set_reshard_after_backward(micro == 2)
            loss = loss + token_batch(model, 3 * step + micro, batch_rank)
        return loss

    options = {"reshard_after_forward": False} if keep else {}
    model = tp_race(mesh, plan=plan, backward=backward, **options).run(2)
    with count_comms() as counts:
        backward(model, 0, data_rank(mesh))
    assert (counts["all_gather"], counts["reduce_scatter"]) == (3 if keep else 15, 3)


@on_ranks(4)
def test_unsynced_gradients_stay_unseen(rank: int, world_size: int) -> None:
    """Behaviour 95: without sync the sharded gradients are None, of DTensors too."""
    _, model = sharded()
    model.set_requires_gradient_sync(False)
    with quiet():
        token_batch(model, 0, 0)
    assert all(param.grad is None for param in model.parameters())


class Weighted(nn.Module):
    """One weight on the TP mesh whose gradient is `x`, given to autograd with the placement that the test asks for."""

    def __init__(self, tp_mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.arange(8.0).view(4, 2), tp_mesh, [placement]))

    def forward(self, x: Tensor, placement: Placement) -> Tensor:
        weight: Any = self.weight
        if weight.placements != (Replicate(),):  # whose backward would make the gradient Replicate
            weight = weight.redistribute(placements=[Replicate()])
        return (weight.to_local(grad_placements=[placement]) * x).sum()


@on_ranks(4)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("grad_placement", [Replicate(), Partial()], ids=str)
def test_gradients_are_laid_out_as_the_parameter(
    rank: int, world_size: int, placement: Placement, grad_placement: Placement
) -> None:
    """Behaviour 26: a gradient that is Partial over the TP axis is summed over it before it is averaged over dp."""
    mesh = dp_tp()
    model: Any = API.fully_shard(Weighted(mesh["tp"], placement), mesh=mesh["dp"])
    x = torch.arange(8.0).view(4, 2) * (1 + mesh.get_local_rank("dp"))
    if grad_placement == Partial():
        x = x + mesh.get_local_rank("tp")
    model(x, grad_placement).backward()
    expected = torch.arange(8.0).view(4, 2) * 1.5
    if grad_placement == Partial():
        expected = 2 * expected + 1
    grad = model.weight.grad
    assert grad.placements == model.weight.placements
    assert_close(grad.full_tensor(), expected)


@on_ranks(4)
def test_differently_placed_gradients_add_up(rank: int, world_size: int) -> None:
    """Behaviour 96: a Partial and a Replicate gradient of two microbatches, and a sharded one before, make one sum."""
    mesh = dp_tp()
    model: Any = API.fully_shard(Weighted(mesh["tp"], Replicate()), mesh=mesh["dp"])
    ones = torch.ones(4, 2)
    model(ones, Replicate()).backward()
    model.set_requires_gradient_sync(False)
    model(10 * ones, Partial()).backward()
    model.set_requires_gradient_sync(True)
    model(100 * ones, Replicate()).backward()
    assert_close(model.weight.grad.full_tensor(), 121 * ones)


@on_ranks(4)
def test_plain_and_tensor_parallel_in_one_unit(rank: int, world_size: int) -> None:
    """Behaviour 158: norms without TP lie on the dp mesh alone, in the same group, and are equal on all TP ranks."""
    mesh = dp_tp()
    plain, model = sharded()
    norm = model.blocks[0].norm
    assert (norm.weight.device_mesh, norm.weight.placements) == (mesh["dp"], (Shard(0),))
    with count_comms() as counts:
        token_batch(model, 0, data_rank(mesh))
    assert counts["reduce_scatter"] == 3
    assert (norm.weight.grad.device_mesh, norm.weight.grad.placements) == (mesh["dp"], (Shard(0),))
    assert_tp_gradients(model, mean_gradients(plain, 2, lambda m, r: token_batch(m, 0, r)))


@on_ranks(4)
def test_frozen_parameters(rank: int, world_size: int) -> None:
    """Behaviour 89, 90: frozen TP weights get no gradient, their biases do; unfrozen again, all do."""
    mesh = dp_tp()
    plain, model = sharded()
    for frozen in (True, False):
        for m in (plain, model):
            for name, param in m.named_parameters():
                if name.endswith(("up.weight", "down.weight")):
                    param.requires_grad_(not frozen)
        with quiet():
            check_step(model, plain, mesh)
        assert (model.blocks[0].up.weight.grad is None) == frozen


class Choosy(nn.Module):
    """Two TP layers, of which each data-parallel rank may use another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


@on_ranks(4)
def test_unused_parameters_reduce_zeros(rank: int, world_size: int) -> None:
    """Behaviour 92: ranks that used different TP layers agree, with zeros for what they did not use."""
    mesh = dp_tp()
    plain = Choosy()
    model: Any = copy.deepcopy(plain)
    style = {
        "layers.0": ColwiseParallel(output_layouts=Replicate()),
        "layers.1": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], style)
    API.fully_shard(model, mesh=mesh["dp"])
    model.set_reduce_scatter_unused_params(True)
    x = torch.arange(2.0 * DIM).view(2, DIM) / DIM

    def backward(m: nn.Module, r: int) -> None:
        m(x + r, r).square().sum().backward()

    with quiet():
        backward(model, data_rank(mesh))
    assert_tp_gradients(model, mean_gradients(plain, 2, backward))


@on_ranks(4)
def test_ignored_parameters(rank: int, world_size: int) -> None:
    """Behaviour 93: an ignored TP parameter stays what TP made it."""
    mesh = dp_tp()
    model: Any = parallelize(TpLm(), mesh["tp"])
    ignored = model.blocks[0].up.weight
    API.fully_shard(model, mesh=mesh["dp"], ignored_params={ignored})
    assert model.blocks[0].up.weight is ignored
    assert (ignored.device_mesh, ignored.placements) == (mesh["tp"], (Shard(0),))
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    assert ignored.grad.placements == (Shard(0),)
    assert model.blocks[0].up.bias.grad.placements == (_StridedShard(0, split_factor=2), Shard(0))


@on_ranks(4)
def test_tied_parameters(rank: int, world_size: int) -> None:
    """Behaviour 13, 87: embedding and head share one TP parameter in every form, and get the sum of both gradients."""
    mesh = dp_tp()

    def build() -> nn.Module:
        model = TpLm()
        model.head.weight = model.embed.weight
        return model

    def shard(api: Any, model: Any) -> None:
        parallelize(model, mesh["tp"], "sequence")
        model.head.weight = model.embed.weight  # each style has made a parameter of its own
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])

    model: Any = tp_race(mesh, build, shard, exact=True).run(3)
    assert model.head.weight is model.embed.weight
    model.unshard()
    assert model.head.weight is model.embed.weight
    model.reshard()


# --- meshes of three axes ---------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
@every_plan
def test_hsdp(rank: int, world_size: int, sizes: tuple[int, int], plan: str) -> None:
    """Behaviour 159: parameters on ("dp_replicate", "dp_shard", "tp"); gradients also all-reduced over the replicas."""
    mesh = hsdp_tp(*sizes)
    model = tp_race(mesh, plan=plan, exact=True).run(2)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Replicate(), *placements_after(name, plan)), name
        names = ("dp_replicate", "dp_shard", "tp")[: len(param.placements)]
        assert param.device_mesh.mesh_dim_names == names, name
    with count_comms() as counts:
        token_batch(model, 0, data_rank(mesh))
    assert counts["all_reduce"] == 3
    assert (counts["reduce_scatter"] == 0) == (sizes[1] == 1)


@pytest.mark.exhaustive
@on_ranks(8)
def test_hsdp_on_eight_ranks(rank: int, world_size: int) -> None:
    """Behaviour 159: all three axes at work."""
    tp_race(hsdp_tp(2, 2), lambda: TpLm(depth=1), plan="sequence", exact=True).run(2)


@on_ranks(4)
def test_two_meshes_of_one_process(rank: int, world_size: int) -> None:
    """Behaviour 158: DTensor takes a parameter's mesh from a cache, in which equal meshes are one. So the TP mesh of a
    model may be another object than its user passed, and part of another mesh that the process has made over its
    ranks."""
    for mesh in (dp_tp(), hsdp_tp(1, 2), dp_tp(), hsdp_tp(2, 1)):
        plain, model = sharded(mesh)
        for name, param in model.named_parameters():
            assert torch.equal(local(param.detach()), shard_like(plain.get_parameter(name), param)), name
            assert torch.equal(full(param), plain.get_parameter(name)), name
        model.unshard()
        model.reshard()


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_two_model_axes(rank: int, world_size: int, sizes: tuple[int, int, int]) -> None:
    """Behaviour 159: EP and TP, two axes of model parallelism, beside one for the data."""
    mesh = mesh_of(sizes, ("dp", "ep", "tp"))
    whole = torch.arange(48.0).view(8, 6)
    model: Any = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["ep", "tp"], [Shard(0), Shard(1)]))
    model.forward = lambda: model.weight.redistribute(placements=[Replicate()] * 2).to_local().square().sum()
    API.fully_shard(model, mesh=mesh["dp"])
    first = _StridedShard(0, split_factor=2) if sizes[1] == 2 else Shard(0)
    assert model.weight.placements == (first, Shard(0), Shard(1))
    assert model.weight.device_mesh == mesh
    assert torch.equal(model.weight.full_tensor(), whole)
    model.unshard()
    assert (model.weight.device_mesh, model.weight.placements) == (mesh["ep", "tp"], (Shard(0), Shard(1)))
    model.reshard()
    model().backward()
    assert model.weight.grad.placements == model.weight.placements
    assert_close(model.weight.grad.full_tensor(), 2 * whole)


# --- other shard dims, errors -----------------------------------------------------------------------------------------


def other_dim(param: nn.Parameter) -> Shard | None:
    """The dim of a matrix that TP does not use; the default for everything else."""
    if not isinstance(param, DTensor) or param.ndim != 2 or not isinstance(param.placements[0], Shard):
        return None
    return Shard(1 - param.placements[0].dim)


@on_ranks(4)
def test_shard_dim_that_tp_does_not_use(rank: int, world_size: int) -> None:
    """Behaviour 162: `Shard` over both axes, no `_StridedShard`, for weights in colwise and in rowwise style."""
    mesh = dp_tp()
    model = tp_race(mesh, shard_placement_fn=other_dim, exact=True).run(3)
    assert model.get_parameter("blocks.0.up.weight").placements == (Shard(1), Shard(0))
    assert model.get_parameter("blocks.0.down.weight").placements == (Shard(0), Shard(1))
    assert model.get_parameter("blocks.0.up.bias").placements == placements_after(".up.bias")


@on_ranks(4)
@pytest.mark.parametrize("dim", [1, -1])
def test_shard_dim_that_tp_uses(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 27, 162: dim 1 of a rowwise weight is cut by TP first, then by fully_shard; negative dims count too."""
    mesh = dp_tp()
    model: Any = nn.Linear(8, 4)
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
    API.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)
    assert model.weight.placements == (_StridedShard(1, split_factor=2), Shard(1))
    assert torch.equal(model.weight.to_local(), shard_like(plain.weight, model.weight))
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    x = torch.ones(2, 8) + data_rank(mesh)
    with quiet():
        model(x).square().sum().backward()
    expected = mean_gradients(plain, 2, lambda m, r: m(torch.ones(2, 8) + r).square().sum().backward())
    assert_tp_gradients(model, expected)


@on_ranks(4)
@ours_only("NotImplementedError (Behaviour 75)")
def test_reshard_to_a_smaller_group(rank: int, world_size: int) -> None:
    """Behaviour 75: an int for `reshard_after_forward` trains as one process does."""
    tp_race(dp_tp(4, 1), reshard_after_forward=2, torch=False).run(3)


@on_ranks(4)
@ours_only("it looks only at DTensors that would have to move, and none on meta has to")
def test_tp_mesh_of_another_device_type(rank: int, world_size: int) -> None:
    """Behaviour 161: a parameter on a mesh of another device type is refused, naming both types."""
    other = mesh_of((2, 2), ("dp", "tp"), "meta")["tp"]
    local_part = torch.empty(4, DIM, device="meta")
    model: Any = nn.Linear(DIM, DIM, bias=False)
    weight: Any = DTensor.from_local(local_part, other, [Shard(0)], run_check=False)
    weight._is_param = True  # as nn.Parameter does, but for the detach, which torch 2.15 cannot do on such a mesh
    model.weight = weight.requires_grad_()
    error = error_of(API.fully_shard, model, mesh=dp_tp()["dp"])
    assert isinstance(error, ValueError), error
    assert "meta" in str(error) and "cpu" in str(error) and "weight" in str(error)


# --- life outside of training -----------------------------------------------------------------------------------------


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_meta_init(rank: int, world_size: int, plan: str, hsdp: bool) -> None:
    """Behaviour 31: meta, TP, fully_shard, to_empty, initialise, train."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain = TpLm()
    with torch.device("meta"):
        model: Any = TpLm()
    tp_shard(API, model, mesh, plan)
    assert all(isinstance(param, DTensor) and param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for (name, param), value in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.placements == (Replicate(),) * hsdp + placements_after(name, plan)
            local(param).copy_(shard_like(value, param))
    with quiet():
        check_step(model, plain, mesh)


@on_ranks(4)
def test_reset_parameters_after_to_empty(rank: int, world_size: int) -> None:
    """Behaviour 31: torch's `reset_parameters` runs on parameters of both kinds, and both move in training."""
    with torch.device("meta"):
        model: Any = TpLm()
    tp_shard(API, model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        with quiet():
            losses.append(token_batch(model, 0, 0).item())
        optim.step()
        optim.zero_grad()
    assert losses[-1] < losses[0]


@on_ranks(4)
def test_conversion(rank: int, world_size: int) -> None:
    """Behaviour 33: to fp64, before the first forward, with parameters, specs and gradients."""
    plain, model = sharded()
    model.double()
    plain.double()
    for name, param in model.named_parameters():
        assert param.placements == placements_after(name)
        assert (param.dtype, param.to_local().dtype) == (torch.float64, torch.float64)
    with quiet():
        check_step(model, plain, dp_tp())


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("raf", [True, False])
def test_state_dict(rank: int, world_size: int, plan: str, raf: bool) -> None:
    """Behaviour 167, 169: DTensors under the plain names, also right after forward; loading them restores the
    values."""
    mesh = dp_tp()
    plain, model = sharded(plan=plan, reshard_after_forward=raf)
    with quiet():
        model(tokens(0, data_rank(mesh)))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert state[name].placements == placements_after(name, plan), name
        assert_close(state[name].full_tensor(), value)
    _, other = sharded(plan=plan)
    with torch.no_grad():
        for param in other.parameters():
            local(param).add_(1)
    assert other.load_state_dict(state) == model.load_state_dict(state)
    with quiet():
        check_step(other, plain, mesh)
        check_step(model, plain, mesh)


@on_ranks(4)
@every_plan
def test_load_by_assignment(rank: int, world_size: int, plan: str) -> None:
    """Behaviour 169, 170: full tensors, distributed as the model's own DTensors, are assigned to a model on meta."""
    mesh = dp_tp()
    plain = TpLm()
    with torch.device("meta"):
        model: Any = TpLm()
    tp_shard(API, model, mesh, plan)
    state = {}
    for name, value in model.state_dict().items():
        whole = plain.state_dict()[name]
        part = shard_like(whole, value)
        assert part is not None
        state[name] = DTensor.from_local(
            part.clone(), value.device_mesh, value.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    model.load_state_dict(state, assign=True)
    assert all(not param.is_meta and param.requires_grad for param in model.parameters())
    with quiet():
        check_step(model, plain, mesh)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_full_state_dict(rank: int, world_size: int, plan: str, hsdp: bool) -> None:
    """Behaviour 170: torch's own helpers gather the full state dict on rank 0, and load it from there."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain, model = sharded(mesh, plan)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    assert sorted(whole) == (sorted(plain.state_dict()) if rank == 0 else [])
    for name, value in whole.items():
        assert torch.equal(value, plain.state_dict()[name]), name
    torch.manual_seed(1)
    _, other = sharded(mesh, plan)
    assert not torch.equal(full(other.embed.weight), plain.embed.weight)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with quiet():
        check_step(other, plain, mesh)


@on_ranks(4)
def test_optimizer_state(rank: int, world_size: int) -> None:
    """Behaviour 158, 170: Adam's moments lie as the parameters do, and torch's helper gathers them whole."""
    mesh = dp_tp()
    plain, model = sharded()
    optim = torch.optim.Adam(model.parameters())
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    optim.step()
    for param in model.parameters():
        moment = optim.state[param]["exp_avg"]
        assert (moment.device_mesh, moment.placements) == (param.device_mesh, param.placements)
    state = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        for name, grad in mean_gradients(plain, 2, lambda m, r: token_batch(m, 0, r)).items():
            assert grad is not None
            assert_close(state["state"][name]["exp_avg"], 0.1 * grad, rtol=1e-4, atol=1e-6)


@on_ranks(4)
@pytest.mark.parametrize(("norm_type", "hsdp"), [(1, False), (2, False), (3, False), (float("inf"), False), (2, True)])
def test_clip_grad_norm(rank: int, world_size: int, norm_type: float, hsdp: bool) -> None:
    """Behaviour 171: torch's own function gives the global norm as a DTensor, and clips to it (all parameters TP)."""
    mesh = hsdp_tp(1, 2) if hsdp else dp_tp()
    plain, model = sharded(mesh, "sequence")
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    for name, grad in mean_gradients(plain, 2, lambda m, r: token_batch(m, 0, r)).items():
        plain.get_parameter(name).grad = grad
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    assert isinstance(norm, DTensor)
    assert_close(norm.full_tensor(), expected, rtol=1e-4, atol=1e-6)
    assert_tp_gradients(model, {name: param.grad for name, param in plain.named_parameters()})
