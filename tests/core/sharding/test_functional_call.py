"""`torch.func.functional_call`, and whoever else puts something in the place of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.func import functional_call

import fsdp2
from fsdp2 import ArgumentError, fully_shard
from tests.helpers.ranks import on_ranks

X = torch.ones(1, 4)


def make(shard: Callable[..., Any] | None, **options: Any) -> Any:
    """Two layers, each a unit, which ran once: a first forward takes up whatever the modules hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard is not None:
        shard(model[0], **options)
        shard(model, **options)
    model(X)
    return model


def zeros(model: nn.Module, kind: str) -> Tensor:
    return torch.zeros_like(model.get_parameter("0.weight")) if kind == "sharded" else torch.zeros(4, 4)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_other_parameters_are_not_passed_over(rank: int, world_size: int, kind: str) -> None:
    """The all-gather put the unit's own parameters where those of the call were, and nobody said so. torch does that
    still; when this fails it does not, and our error may go."""
    plain, theirs, ours = (make(shard) for shard in (None, torch.distributed.fsdp.fully_shard, fully_shard))
    expected = functional_call(plain, {"0.weight": torch.zeros(4, 4)}, (X,))
    assert not torch.equal(expected, plain(X))
    assert torch.equal(functional_call(theirs, {"0.weight": zeros(theirs, kind)}, (X,)), plain(X))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'0\.weight' is sharded, and its module holds a D?Tensor"):
            functional_call(ours, {"0.weight": zeros(ours, kind)}, (X,))
        ours.reset_iter_state()
        assert torch.equal(ours(X), plain(X))


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}], ids=str)
def test_its_own_parameters(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Those of `named_parameters`, also detached, are what it computes with anyway; buffers are taken as they come."""
    model = make(fully_shard, **options)
    expected = model(X)
    assert torch.equal(functional_call(model, dict(model.named_parameters()), (X,)), expected)
    for unit in (model, model[0]):
        unit.reshard()
    own = {name: param.detach() for name, param in model.named_parameters()}
    assert torch.equal(functional_call(model, own, (X,)), expected)
    model.reset_iter_state()  # the root stays unsharded, and functional_call puts sharded parameters back
    model(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_parameter_that_was_set_after_the_first_forward(rank: int, world_size: int) -> None:
    """Put there by hand it was passed over as well; `load_state_dict(assign=True)` puts one there for good."""
    model = make(fully_shard)
    doubled = model[0].weight.detach() * 2
    expected = nn.functional.linear(X, doubled.full_tensor(), model[0].bias.full_tensor())
    before, model[0].weight = model[0].weight, nn.Parameter(doubled)
    with pytest.raises(ArgumentError, match="assign=True"):
        model(X)
    model[0].weight = before
    model.reset_iter_state()
    model[0].load_state_dict({"weight": doubled, "bias": model[0].bias}, assign=True)
    assert torch.equal(model[0](X), expected)


@on_ranks(2)
def test_a_module_without_direct_slots(rank: int, world_size: int) -> None:
    """An RNN watches its attributes, so its parameters are set one by one."""
    torch.manual_seed(0)
    model = fsdp2.fully_shard(nn.RNN(4, 4))
    x = torch.ones(2, 1, 4)
    expected = model(x)[0]
    model.reshard()
    with pytest.raises(ArgumentError, match="weight_hh_l0"):
        functional_call(model, {"weight_hh_l0": torch.zeros(4, 4)}, (x,))
    model.reset_iter_state()
    assert torch.equal(model(x)[0], expected)
