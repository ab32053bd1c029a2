"""Shared, frozen and unused parameters (tests/behaviour.md, section K)."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import events, fully_shard
from tests.helpers.models import (
    Transformer,
    check_step,
    is_sharded,
    linears,
    numels,
    reference_grads,
    run_step,
    sharded_copy,
    tokens,
    units,
)
from tests.helpers.parity_models import assert_gradients, batch, full, mean_gradients
from tests.helpers.ranks import on_ranks


def shard_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Every child with parameters is a unit, and then the root."""
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


# --- shared -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_no_false_ties_when_built_layer_by_layer(rank: int, world_size: int) -> None:
    """Behaviour 87: freed parameters' ids are used again; that does not tie the layers."""
    model = nn.Sequential()
    for _ in range(20):
        model.append(fully_shard(nn.Linear(4, 4)))
        gc.collect()
    fully_shard(model)
    run_step(model, rank)
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("vocab", [5, 11])
def test_every_row_of_a_tied_uneven_weight_is_updated(rank: int, world_size: int, vocab: int) -> None:
    """Behaviour 88: also those of the rank whose shard is padded, or smaller than the others'."""
    plain = Transformer(vocab=vocab, tied=True)
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def backward(module: nn.Module, which: int) -> None:
        module(tokens(0, which, vocab)).square().mean().backward()

    backward(model, rank)
    before = full(model.embed.weight).clone()
    with torch.no_grad():
        for param in model.parameters():
            param -= param.grad
    after = full(model.embed.weight)
    assert model.embed.weight is model.head.weight
    assert ((after - before).abs().sum(1) > 0).all(), "the head reaches every row"
    grads = mean_gradients(plain, world_size, backward)
    torch.testing.assert_close(after, before - grads["embed.weight"])


# --- frozen -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_bias_only_training(rank: int, world_size: int, when: str) -> None:
    """Behaviour 89: all parameters are gathered, biases reduced - as soon as their unit is through."""
    plain = linears(3)

    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith("bias"))

    freeze(plain)
    model = copy.deepcopy(plain) if when == "before" else linears(3)
    model.load_state_dict(plain.state_dict())
    shard_layers(model, reshard_after_forward=True)
    freeze(model)
    with events.record() as log:
        run_step(model, rank)
    assert sorted(numels(log, "all_gather")) == sorted([("0", 20), ("1", 20), ("2", 20)] * 2)
    assert sorted(numels(log, "reduce_scatter")) == [("0", 2), ("1", 2), ("2", 2)]
    order = [(event.kind, event.unit) for event in log]
    assert order.index(("reduce_scatter", "2")) < order.index(("pre_backward", "0")), "not delayed"
    assert all(param.grad is None for name, param in model.named_parameters() if name.endswith("weight"))
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_unit(rank: int, world_size: int, when: str) -> None:
    """Behaviour 90: gathered as usual, never reduced; unfreezing later brings its gradients."""
    plain = linears(3)
    model = copy.deepcopy(plain)
    if when == "before":
        model[1].requires_grad_(False)
    shard_layers(model, reshard_after_forward=True)
    model[1].requires_grad_(False)
    with events.record() as log:
        run_step(model, rank)
    assert sorted(units(log, "all_gather")) == ["0", "0", "1", "1", "2", "2"]
    assert sorted(units(log, "reduce_scatter")) == ["0", "2"]
    assert model[1].weight.grad is None
    model[1].requires_grad_(True)
    check_step(model, plain, rank, world_size)
    model.requires_grad_(True)
    check_step(model, plain, rank, world_size, step=1)


@on_ranks(2)
def test_everything_frozen_with_inputs_that_require_grad(rank: int, world_size: int) -> None:
    """Behaviour 90: backward gathers all units, in reverse, and reduces nothing."""
    plain = linears(3).requires_grad_(False)
    model = sharded_copy(plain, lambda m: shard_layers(m, reshard_after_forward=True))
    x = batch(0, rank, 4).requires_grad_()
    loss = model(x).square().mean()
    with events.record() as log:
        loss.backward()
    assert units(log, "all_gather") == ["2", "1", "0"]
    assert units(log, "reduce_scatter") == []
    assert is_sharded(model) and all(param.grad is None for param in model.parameters())
    expected = batch(0, rank, 4).requires_grad_()
    plain(expected).square().mean().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# --- unused -----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Runs the branches that it is told to."""

    def __init__(self, *run: str) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.run = list(run)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        for name in self.run:
            x = self.get_submodule(name)(x)
        return x


@on_ranks(2)
def test_unused_parameters(rank: int, world_size: int) -> None:
    """Behaviour 91: no gradient, and no part in the reduction; with time the used ones change."""
    plain = Branches()
    model = sharded_copy(plain, fully_shard)
    for step, run in enumerate((["left"], ["right"], [], ["left", "frozen", "right"])):
        plain.run = model.run = run
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        used = 10 + 10 * ("left" in run) + 8 * ("right" in run)
        assert numels(log, "reduce_scatter") == [("", used)]


class Detached(nn.Module):
    """Its parameters take part in forward, not in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).detach()


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
def test_unit_without_gradients_reduces_nothing(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 91: not even an empty reduction; where it was kept unsharded, the end of backward reshards it."""
    plain = nn.Sequential(Detached(), nn.Linear(4, 4), Detached(), nn.Linear(4, 4))
    model = sharded_copy(plain, lambda m: shard_layers(m, reshard_after_forward=raf))
    with events.record() as log:
        check_step(model, plain, rank, world_size)
    assert sorted(units(log, "reduce_scatter")) == ["1", "3"]
    assert model[0].linear.weight.grad is None and model[2].linear.weight.grad is None


class SideOutput(nn.Module):
    """Its gradients come by an attribute, not by its output; a part of it is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches("left")
        self.side = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.side = self.branches.left(self.branches.always(x)).square().mean()
        return x


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_that_do_not_come_by_the_output(rank: int, world_size: int, whole: bool) -> None:
    """Behaviour 91: no hook announces this backward; the gradients are reduced and the unit is resharded all the
    same."""
    plain = nn.Sequential(SideOutput(), nn.Linear(4, 4))
    if whole:
        del plain[0].branches.right, plain[0].branches.frozen
    model = sharded_copy(plain, lambda m: shard_layers(m, reshard_after_forward=False))

    def backward(module: nn.Module, which: int) -> None:
        out = module(batch(0, which, 4)).square().mean()
        (out + module[0].side).backward()

    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        assert is_sharded(model)
        assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2, 4)
def test_ranks_with_different_control_flow(rank: int, world_size: int) -> None:
    """Behaviour 92: parameters that a rank does not use count as zeros there; those that nobody used are zero."""
    plain = Branches()
    model = sharded_copy(plain, fully_shard)
    model.set_reduce_scatter_unused_params(True)
    model.run = ["left"] if rank % 2 else []
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "reduce_scatter")[0][1] == {2: 28, 4: 14}[world_size], "all but the frozen ones"

    def backward(module: nn.Module, which: int) -> None:
        module.run = ["left"] if which % 2 else []
        run_step(module, which)

    expected = mean_gradients(plain, world_size, backward)
    expected["right.weight"] = torch.zeros(4, 4)
    assert_gradients(model, expected)
    assert model.frozen.weight.grad is None


class OptionalScale(nn.Module):
    """Own parameters at the very end, of which one is optional; a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.run = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale
        return x + self.shift if self.run else x


@on_ranks(2)
def test_order_of_reductions_does_not_depend_on_the_rank(rank: int, world_size: int) -> None:
    """Behaviour 92: where one rank has all gradients of the root early and the other never, both reduce in one
    order."""
    plain = OptionalScale()
    model = sharded_copy(plain, shard_layers)
    model.set_reduce_scatter_unused_params(True)

    def backward(module: nn.Module, which: int) -> None:
        module.run = which == 1
        run_step(module, which)

    with events.record() as log:
        backward(model, rank)
    assert units(log, "reduce_scatter") == ["", "layer"]
    assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["after_forward", "after_unshard"])
@pytest.mark.parametrize("freeze", [True, False])
def test_freezing_what_is_unsharded(rank: int, world_size: int, when: str, freeze: bool) -> None:
    """A root stays unsharded after forward, so ``model.head.requires_grad_(False)`` reaches the unsharded parameter,
    whether the user knows or not. On torch the sharded one does not follow, and the next step trains it; here it is
    frozen as in one process, and unfrozen alike."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[1].weight.requires_grad_(freeze)
    model: Any = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    sharded = model[1].weight

    def steps(m: Any, r: int) -> None:
        if m is not model:
            m[1].weight.requires_grad_(freeze)  # the batches of all ranks go through one process
        loss = m(batch(0, r, 4)).square().sum() if when == "after_forward" else None
        if when == "after_unshard" and m is model:
            model.unshard()
        m[1].weight.requires_grad_(not freeze)
        if when == "after_unshard" and m is model:
            model.reshard()
        if loss is not None:
            loss.backward()
        for step in (1, 2):
            m(batch(step, r, 4)).square().sum().backward()

    steps(model, rank)
    assert sharded.requires_grad is not freeze and model[1].weight is sharded
    assert_gradients(model, mean_gradients(plain, world_size, steps))


class Either(nn.Module):
    """Ranks take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.even(x) if rank % 2 == 0 else self.odd(x)


class TwoEither(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Either()
        self.second = Either()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.second(self.first(x, rank), rank)


@on_ranks(2, 4)
def test_zeros_for_unused_parameters_were_sent_twice(rank: int, world_size: int) -> None:
    """With set_reduce_scatter_unused_params, a unit sent zeros for unused parameters at the end of its backward, and
    again at the end of the whole backward, since they still had no gradient. A rank on which the unit's backward did
    not run would have sent them once: a hang."""
    model = TwoEither()
    for unit in (model.first, model.second):
        fully_shard(unit)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    with events.record() as log:
        model(torch.ones(2, 4, requires_grad=True), rank).sum().backward()
    assert sorted(event.unit for event in log if event.kind == "reduce_scatter") == ["first", "second"]
    assert all(param.grad is not None for param in model.parameters())
