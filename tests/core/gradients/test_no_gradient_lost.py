"""Gradients are not lost: of kept tensors, of losses outside of forward, with hooks, asked for by name."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, OrderError, fully_shard
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import assert_gradients, batch, mean_gradients, mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.two_units import STAYS, backward, evaluate, layers, loss, pair, shard

# --- backwards that reach a unit by no output of it -------------------------------------------------------------------


class Head(nn.Module):
    """A language model without a loss; its head may be tied to the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.body(self.embed(tokens))
        return out


def cross_entropy(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy((hidden @ weight.t()).float(), tokens, reduction="sum")


def fused_loss(model: Any, rank: int, checkpointed: bool, seed: int = 0) -> Tensor:
    tokens = torch.tensor([rank, 2 + rank, 5 + seed])
    hidden = model(tokens)
    if isinstance(model, fsdp2.FSDPModule):
        model.head.unshard()  # type: ignore[operator]
    run = partial(checkpoint, cross_entropy, use_reentrant=False) if checkpointed else cross_entropy
    return run(hidden, model.head.weight, tokens)  # type: ignore[no-any-return]


@on_ranks(2, 4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_loss_that_reads_a_weight(
    rank: int, world_size: int, tied: bool, checkpointed: bool, precision: torch.dtype
) -> None:
    """As fused cross-entropy losses do: `unshard()` on the module that holds the weight, and then the loss."""
    plain = Head(tied)
    model: Any = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(None if precision == torch.float32 else precision, torch.float32)
    mesh = mesh_2d(2, 2) if world_size == 4 else None
    for module in (model.embed, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def microbatches(each: Any, rank: int) -> None:
        for seed in range(2):
            if each is model:
                model.set_requires_gradient_sync(seed == 1)
            fused_loss(each, rank, checkpointed, seed).backward()

    microbatches(model, rank)
    tolerance = {} if precision == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    assert_gradients(model, mean_gradients(plain, world_size, microbatches), **tolerance)


# --- hooks on parameters ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "between steps"])
def test_hooks_on_parameters(rank: int, world_size: int, when: str) -> None:
    """They see the gradient that the optimizer will see, and may replace it."""
    plain, seen = layers(), []
    model: Any = copy.deepcopy(plain)

    def add_hooks(each: nn.Module) -> list[Any]:
        weight = each[2].weight  # type: ignore[index]
        return [
            weight.register_hook(lambda grad: grad * 3),  # type: ignore[operator]
            weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad)),  # type: ignore[operator]
        ]

    handles = add_hooks(model) if when == "before" else []
    shard(model)
    if when == "between steps":
        backward(model, rank)
        model.zero_grad()
    handles = handles or add_hooks(model)
    backward(model, rank)
    right = mean_gradients(plain, world_size, backward)
    assert_gradients(model, {**right, "2.weight": right["2.weight"] * 3})
    assert len(seen) == 1 and seen[0] is model[2].weight.grad
    for handle in handles:
        handle.remove()
    check(model, plain, rank, world_size, backward)


# --- gradients that autograd returns ----------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("how", ["inputs", "grad", "grad of a layer alone"])
def test_gradients_with_respect_to_parameters(rank: int, world_size: int, how: str) -> None:
    """The graph has the unsharded parameters, so there are none, and the step did nothing. It says so."""
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    evaluate(model, rank)  # makes it the root
    value = loss(model[0] if how.endswith("alone") else model, rank)
    if how == "inputs":
        value.backward(inputs=params)
    else:
        assert set(torch.autograd.grad(value, params, allow_unused=True)) == {None}
    with pytest.warns(UserWarning, match="Call loss.backward"):
        optimizer.step()
    backward(model, rank)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("stays", ["default", "kept"])
def test_a_gradient_of_unsharded_parameters(rank: int, world_size: int, stays: str) -> None:
    """It was this rank's own, and nobody averaged it."""
    plain, model = pair(**STAYS[stays])
    value = loss(model, rank)
    with pytest.raises(OrderError, match=r"torch.autograd.grad would return this rank's own gradient"):
        torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
def test_a_backward_for_all_that_parameters_returns(rank: int, world_size: int) -> None:
    """The root's unsharded parameters get gradients, a layer's sharded ones get none."""
    plain = layers()
    model: Any = copy.deepcopy(plain)
    fully_shard(model[2])
    fully_shard(model)
    with pytest.warns(UserWarning, match=r"backward\(inputs=...\) gave gradients.* none to those of '2'"):
        loss(model, rank).backward(inputs=list(model.parameters()))
    x = batch(0, rank, 4).requires_grad_()
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (plain, model)]
    assert_close(*grads)
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
def test_one_rank_runs_another_forward(rank: int, world_size: int) -> None:
    """Without a backward, of units that stay unsharded, to log something. The ranks reduced in other orders."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    plain = nn.Sequential(Part(), Part())
    model = in_units(plain, reshard_after_forward=False)
    for module in (model, *model):
        module.unshard()
    if rank == 0:
        loss(model, rank)
    check(model, plain, rank, world_size, backward)


# --- units that are used several times --------------------------------------------------------------------------------


@on_ranks(2)
def test_a_reduction_in_flight_when_another_unit_becomes_the_root(rank: int, world_size: int) -> None:
    """A loss on an unsharded weight before the first forward, whose backward was not the last: it was dropped."""
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model[0].set_is_last_backward(False)
    model[0].unshard()
    model[0].weight.sum().backward()
    model[0].reshard()
    model(torch.ones(2, 4))
    assert torch.equal(model[0].weight.grad.full_tensor(), torch.ones(4, 4))
