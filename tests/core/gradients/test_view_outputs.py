"""The story of a bug: changing a unit's output in place, where that output is a view, lost its backward.

A tensor hook on a view stays with the node that the view had. An in-place change gives the view another node, below
that of its base; backward then never passes the hooked node, so that the unit was not unsharded.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import events, fully_shard
from tests.helpers.models import reference_grads, run_step, units
from tests.helpers.parity_models import assert_gradients, count
from tests.helpers.ranks import on_ranks


class View(nn.Module):
    """(rows, 4) -> (rows, 2, 2), a view of what its layer computed; or a slice of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return {"reshaped": x.view(-1, 2, 2), "sliced": x[:, 1:], "nested": x.view(-1, 2, 2)[:, 0]}[self.how]


class InPlace(nn.Module):
    """Two views, both changed in place by their caller."""

    def __init__(self, how: str, change_base: bool) -> None:
        super().__init__()
        self.first = View(how)
        self.second = View(how)
        self.change_base = change_base

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += 1.0
        z = self.second(x + y.sum())
        target = z._base if self.change_base else z
        assert target is not None
        target.mul_(2)
        return z


@on_ranks(2)
@pytest.mark.parametrize("how", ["reshaped", "sliced", "nested"])
@pytest.mark.parametrize("change_base", [False, True])
def test_in_place_change_of_a_view(rank: int, world_size: int, how: str, change_base: bool) -> None:
    """Behaviour 54: in-place changes of outputs are fine, of views as well: same gradients, all units gathered."""
    torch.manual_seed(0)
    plain = InPlace(how, change_base)
    model = copy.deepcopy(plain)
    for unit in (model.first, model.second, model):
        fully_shard(unit, reshard_after_forward=True)
    for step in range(2):
        model.zero_grad()
        with events.record() as log:
            run_step(model, rank, step)
        assert sorted(units(log, "all_gather")) == ["first", "first", "second", "second"]
        assert_gradients(model, reference_grads(plain, world_size, step))


class Biased(nn.Module):
    """Returns an input as it is, or a view of it, as blocks of T5 do with what they add to attention."""

    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.returns_view = returns_view

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) + bias), bias.view(4) if self.returns_view else bias


class Passing(nn.Module):
    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([Biased(returns_view) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


@on_ranks(2)
@pytest.mark.parametrize("returns_view", [False, True])
def test_an_input_that_is_returned(rank: int, world_size: int, returns_view: bool) -> None:
    """The hook on the base, which was made before the unit's forward, began the unit's backward again when it was over:
    all blocks were gathered once more at the end, and stayed."""
    torch.manual_seed(0)
    plain = Passing(returns_view)
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    expected = reference_grads(plain, world_size)
    with events.record() as log:
        run_step(model, rank)
    assert_gradients(model, expected)
    assert count(log, "all_gather", "post_backward") == {"all_gather": 2 * 3 + 1, "post_backward": 4}
