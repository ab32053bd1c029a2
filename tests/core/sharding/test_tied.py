"""Weights that are tied over units before sharding (Behaviour 87), which torch's FSDP2 tears apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
from fsdp2 import ArgumentError, fully_shard
from tests.helpers.parity_models import Block, batch, local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    ORDERS,
    Tied,
    shard_in_order,
)
from tests.helpers.trained_alike import one_step, train
from tests.helpers.two_layers import X, backward_of


def assert_tied(model: Any) -> None:
    """One parameter under two names, and one entry for optimizers."""
    assert model.embed.weight is model.head.weight
    assert sum(param is model.embed.weight for param in model.parameters()) == 1
    assert len(dict(model.named_parameters())) == len(dict(model.named_parameters(remove_duplicate=False))) - 1


def step_and_check_ties(model: Any, step: int, rank: int) -> Tensor:
    """Forward and backward, in which the weights stay tied."""
    assert_tied(model)
    handles = [
        module.register_forward_hook(lambda *_: assert_tied(model)) for module in (model.blocks[0], model.blocks[1])
    ]
    loss = model(batch(step, rank)).square().mean()
    assert_tied(model)
    loss.backward()
    assert_tied(model)
    for handle in handles:
        handle.remove()
    return loss.detach()


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head", "head_embed", "neither"])
@pytest.mark.parametrize(
    ("root_raf", "recompute"), [(True, False), (False, False), (None, False), (True, True), (None, True)]
)
def test_tied(rank: int, world_size: int, order: str, root_raf: bool | None, recompute: bool) -> None:
    """Behaviour 87, 88: any order of calls, the root holding one of the names or none, resharding after forward or
    not."""

    def shard(api: Any, model: nn.Module) -> None:
        shard_in_order(api, model, order, root_raf)
        assert_tied(model)

    model = train(rank, world_size, lambda: Tied(recompute), shard, backward=step_and_check_ties)
    assert_tied(model)
    assert isinstance(model.head.weight, DTensor)


@on_ranks(2)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head"])
def test_tied_states(rank: int, world_size: int, order: str) -> None:
    """Behaviour 87: `unshard` or `reshard` of one, moves, loading, evaluation: the names never point to two tensors."""
    model: Any = Tied()
    shard_in_order(fsdp2, model, order)
    for name in ORDERS[order]:
        module = model.get_submodule(name)
        module.unshard()
        assert_tied(model)
        module.reshard()
        assert_tied(model)
    for _ in range(2):
        state = model.state_dict()
        assert state["embed.weight"].to_local().data_ptr() == state["head.weight"].to_local().data_ptr()
        model.load_state_dict(state)
        assert_tied(model)
        model.to(torch.float64)
        model.to(torch.float32)
        assert_tied(model)
        with torch.no_grad():
            model(batch(0, rank))
        assert_tied(model)
        one_step(model, 0, rank)
        model.zero_grad()
        assert_tied(model)


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head", "neither"])
def test_tied_on_meta(rank: int, world_size: int, order: str) -> None:
    """Behaviour 31, 87: built on meta and given memory, still one weight; then it trains."""
    plain = Tied()

    def shard(api: Any, model: Any) -> None:
        model.to("meta")
        model.head.weight = model.embed.weight  # `.to` of a plain module tears them apart
        shard_in_order(api, model, order)
        assert_tied(model)
        model.to_empty(device="cpu")
        assert_tied(model)
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            local(param).detach().copy_(shard_like(value.detach(), param))

    train(rank, world_size, lambda: plain, shard, backward=step_and_check_ties)


class ThreeNames(nn.Module):
    """An encoder and a decoder, each with blocks and the same embedding, whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(7, 8), Block(8, 5))
        self.decoder = nn.Sequential(nn.Embedding(7, 8), Block(8, 5))
        self.head = nn.Linear(8, 7, bias=False)
        self.decoder[0].weight = self.head.weight = self.encoder[0].weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(100).long() % 7
        return self.head(self.decoder(tokens) + self.encoder(tokens.flip(1)).tanh()).mean(1)


@on_ranks(2, 4)
@pytest.mark.parametrize("units", [["encoder", "decoder"], ["encoder.0", "decoder.0", "encoder", "decoder", "head"]])
@pytest.mark.parametrize("root_raf", [True, False])
def test_three_names(rank: int, world_size: int, units: list[str], root_raf: bool) -> None:
    """Behaviour 87: nested units hold two of the names, the root or a unit beside them the third."""

    def shard(api: Any, model: Any) -> None:
        for name in units:
            api.fully_shard(model.get_submodule(name))
        api.fully_shard(model, reshard_after_forward=root_raf)
        assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight

    model = train(rank, world_size, ThreeNames, shard)
    assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight
    assert len(list(model.parameters())) == len(list(ThreeNames().parameters()))


def tied() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["unshard", "deepcopy"])
def test_a_borrower_before_its_owner(rank: int, world_size: int, how: str) -> None:
    """`unshard` before the first forward, and a copy of the borrowing module alone."""
    model = tied()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if how == "unshard":
        model[1].unshard()
        assert_close(model[1].weight.detach(), tied()[1].weight.detach())
    else:
        backward_of(model)
        assert_close(copy.deepcopy(model[1])(X), tied()[1](X))


@on_ranks(2)
def test_the_old_weight_assigned_after_sharding(rank: int, world_size: int) -> None:
    """It would train by itself, and on each rank another."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model)
    model[1].weight = weight
    with pytest.raises(ArgumentError, match=r"'1.weight' and '0.weight' are one weight; only the second is sharded"):
        model(torch.ones(2, 4))


@on_ranks(2)
@pytest.mark.parametrize("order", ORDERS)
def test_loaded_by_assignment(rank: int, world_size: int, order: str) -> None:
    """``load_state_dict(assign=True)`` gives each name a parameter of its own, which the next forward refused."""
    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    shard_in_order(fsdp2, model, order)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict({name: nn.Parameter(value) for name, value in state.items()}, assign=True)
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    assert_close(model(batch(0, rank)), plain(batch(0, rank)))
    assert_tied(model)
