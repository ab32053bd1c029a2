"""Training of tensor-parallel models under `fully_shard`: gradients, options, frozen, unused and tied parameters."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing import assert_close

import fsdp2
from tests.helpers.parity_models import mean_gradients
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import (
    PLANS,
    TpLm,
    assert_tp_gradients,
    count_comms,
    data_rank,
    data_ranks,
    dp_tp,
    parallelize,
    quiet,
    sgd,
    token_batch,
    tp_race,
    tp_shard,
)

every_plan = pytest.mark.parametrize("plan", PLANS)


@on_ranks(4)
@every_plan
@pytest.mark.parametrize(("raf", "use_reentrant"), [(True, False), (True, True), (False, None), (None, None)])
def test_training(rank: int, world_size: int, plan: str, raf: bool | None, use_reentrant: bool | None) -> None:
    """Behaviour 118, 158, 175, 176: several Adam steps, bit by bit as torch's FSDP2, and close to one process."""
    build = partial(TpLm, use_reentrant=use_reentrant)
    model: Any = tp_race(dp_tp(), build, plan=plan, reshard_after_forward=raf, exact=True).run(3)
    with count_comms() as counts:
        token_batch(model, 5, data_rank(dp_tp()))
    gathers = {True: 6, None: 5, False: 3}[raf]  # recomputation gathers nothing again
    assert counts == {"all_gather": gathers, "reduce_scatter": 3, "all_reduce": 0}


@on_ranks(4)
@every_plan
def test_mixed_precision(rank: int, world_size: int, plan: str) -> None:
    """Behaviour 113, 114, 116: bf16 on the TP mesh for computation, fp32 for reduction, shards and gradients."""
    mesh = dp_tp()

    def shard(api: Any, model: nn.Module) -> Any:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return tp_shard(api, model, mesh, plan, mp_policy=policy, reshard_after_forward=True)

    # Gradients that are Partial over tp are summed over it in bf16 by torch, in either dtype by us: close, not equal.
    exact = plan == "plain_norms"
    model: Any = tp_race(mesh, shard=shard, plain=False, exact=exact, rtol=0.05, by_norm=True, optim=sgd).run(3)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert (weight.dtype, weight.to_local().dtype) == (torch.bfloat16, torch.bfloat16)
    plain = TpLm()
    model = shard(fsdp2, copy.deepcopy(plain))
    with quiet():
        token_batch(model, 0, data_rank(mesh))
    expected = mean_gradients(plain, data_ranks(mesh), lambda m, r: token_batch(m, 0, r))
    assert_tp_gradients(model, expected, rtol=0.1, atol=0.01)


class Weighted(nn.Module):
    """One weight on the TP mesh whose gradient is `x`, given to autograd with the placement that the test asks for."""

    def __init__(self, tp_mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.arange(8.0).view(4, 2), tp_mesh, [placement]))
        self.unused = nn.Parameter(distribute_tensor(torch.ones(4, 2), tp_mesh, [placement]))

    def forward(self, x: Tensor, placement: Placement) -> Tensor:
        weight: Any = self.weight
        if weight.placements != (Replicate(),):  # whose backward would make the gradient Replicate
            weight = weight.redistribute(placements=[Replicate()])
        return (weight.to_local(grad_placements=[placement]) * x).sum()


@on_ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("grad_placement", [Partial(), Replicate()], ids=str)
def test_gradients_are_laid_out_as_the_parameter(
    rank: int, world_size: int, placement: Placement, grad_placement: Placement
) -> None:
    """Behaviour 26, 92: a gradient that is Partial over the TP axis is summed over it before it is averaged over dp;
    that of an unused parameter is zero where zeros are asked for."""
    mesh = dp_tp()
    model: Any = fsdp2.fully_shard(Weighted(mesh["tp"], placement), mesh=mesh["dp"])
    model.set_reduce_scatter_unused_params(True)
    x = torch.arange(8.0).view(4, 2) * (1 + mesh.get_local_rank("dp"))
    if grad_placement == Partial():
        x = x + mesh.get_local_rank("tp")
    model(x, grad_placement).backward()
    expected = torch.arange(8.0).view(4, 2) * 1.5
    if grad_placement == Partial():
        expected = 2 * expected + 1
    for param, wanted in ((model.weight, expected), (model.unused, torch.zeros(4, 2))):
        assert param.grad.placements == param.placements
        assert_close(param.grad.full_tensor(), wanted)


@on_ranks(4)
def test_differently_placed_gradients_add_up(rank: int, world_size: int) -> None:
    """Behaviour 96: a Partial and a Replicate gradient of two microbatches, and a sharded one before, make one sum."""
    mesh = dp_tp()
    model: Any = fsdp2.fully_shard(Weighted(mesh["tp"], Replicate()), mesh=mesh["dp"])
    ones = torch.ones(4, 2)
    model(ones, Replicate()).backward()
    model.set_requires_gradient_sync(False)
    model(10 * ones, Partial()).backward()
    model.set_requires_gradient_sync(True)
    model(100 * ones, Replicate()).backward()
    assert_close(model.weight.grad.full_tensor(), 121 * ones)


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
