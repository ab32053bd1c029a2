"""Several forwards, several backwards: in one iteration, on one graph, unfinished on purpose (Behaviour 57-60, 63)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import events
from tests.helpers.models import is_sharded, units
from tests.helpers.one_process import check, in_units
from tests.helpers.optimizers import assert_same
from tests.helpers.parity_models import (
    Layers,
    assert_gradients,
    batch,
    count,
    full,
    mean_gradients,
    mesh_2d,
)
from tests.helpers.ranks import on_ranks


def two_forwards(model: nn.Module, rank: int) -> None:
    (model(batch(0, rank, 4)).square().sum() + model(batch(1, rank, 4)).square().sum()).backward()


def retained(model: nn.Module, rank: int) -> None:
    loss = model(batch(0, rank, 4)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def not_the_last(model: Any, rank: int) -> None:
    """Set on the root for its whole tree; each backward reduces."""
    for step in range(3):
        if isinstance(model, fsdp2.FSDPModule):
            model.set_is_last_backward(step == 2)
        model(batch(step, rank, 4)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
def test_several_in_one_iteration(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 57, 60, 63, 105: the gradients are those of one process; afterwards everything is sharded again."""
    plain = Layers(3)
    model = in_units(plain, reshard_after_forward=raf)
    for backward, reductions in ((two_forwards, 1), (retained, 2), (not_the_last, 3)):
        with events.record() as log:
            check(model, plain, rank, world_size, backward, times=2)
        assert count(log, "reduce_scatter") == {"reduce_scatter": 2 * 4 * reductions}
        assert is_sharded(model)


class Branches(nn.Module):
    """Three layers side by side, one output each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


@on_ranks(2)
def test_prefetch_of_the_wrong_unit(rank: int, world_size: int) -> None:
    """Behaviour 59: layer 2's backward prefetches layer 1, which this backward does not need: resharded at its end."""
    plain = Branches()
    model = in_units(plain)

    def first_and_third(m: nn.Module, r: int) -> None:
        out = m(batch(0, r, 4))
        (out[0].sum() + out[2].square().sum()).backward()

    for _ in range(2):
        with events.record() as log:
            check(model, plain, rank, world_size, first_and_third)
        assert units(log, "unshard").count("layers.1") == 2 and "layers.1" not in units(log, "reduce_scatter")
        assert is_sharded(model) and model.layers[1].weight.grad is None


@on_ranks(2)
def test_prefetch_for_a_later_backward(rank: int, world_size: int) -> None:
    """Behaviour 59: before a backward that is not the last, the prefetched unit stays for the next backward."""
    plain = Branches()
    model = in_units(plain)
    out = model(batch(0, rank, 4))
    model.set_is_last_backward(False)
    out[2].square().sum().backward()
    model.set_is_last_backward(True)
    with events.record() as log:
        out[1].sum().backward()
    assert "layers.1" not in units(log, "unshard")

    def both(m: nn.Module, r: int) -> None:
        out = m(batch(0, r, 4))
        (out[2].square().sum() + out[1].sum()).backward()

    assert_gradients(model, mean_gradients(plain, world_size, both))
    assert is_sharded(model)


@on_ranks(2)
def test_gradients_with_respect_to_inputs(rank: int, world_size: int) -> None:
    """Behaviour 48, 51, 64: `autograd.grad` for the input alone, and hooks on it, see what the plain model gives."""
    plain = Layers(2)
    model = in_units(plain, reshard_after_forward=True)
    model._set_unshard_async_op(True)  # it changes nothing
    for _ in range(2):
        x = batch(0, rank, 4).requires_grad_()
        expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
        got: list[Tensor] = []
        x.register_hook(got.append)
        model(x).square().sum().backward()
        assert_close(got[0], expected)
        (input_only,) = torch.autograd.grad(model(x).square().sum(), x)
        assert_close(input_only, expected)
        assert is_sharded(model)
        model.zero_grad()


@on_ranks(2)
def test_child_alone_after_the_root(rank: int, world_size: int) -> None:
    """Behaviour 42: once the root has run, a child may run by itself; it gathers and reduces its own unit."""
    plain = Layers(3)
    model = in_units(plain)
    model(batch(0, rank, 4)).sum().backward()
    with events.record() as log:
        check(model, plain, rank, world_size, lambda m, r: m.layers[1](batch(1, r, 4)).square().sum().backward())
    assert {event.unit for event in log if event.kind in ("all_gather", "reduce_scatter")} == {"layers.1"}
    assert_close(full(model.layers[1].weight), plain.layers[1].weight)


# --- units that run several times -------------------------------------------------------------------------------------


# Which unit runs, in order; a capital under a checkpoint. The first eight are wrong on torch with reentrant ones.
ROUTES = ["AA", "Aa", "AaA", "AAB", "BAA", "ABAB", "AbA", "ABBA", "A", "aA", "aBA", "aabAbBa"]


class Routed(nn.Module):
    def __init__(self, route: str, use_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.route, self.use_reentrant = route, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for name in self.route:
            unit = getattr(self, name.lower())
            x = torch.tanh(checkpoint(unit, x, use_reentrant=self.use_reentrant) if name.isupper() else unit(x))
        return x


def sharded_routes(plain: nn.Module, mesh: Any = None) -> Any:
    model: Any = copy.deepcopy(plain)
    for unit in (model.a, model.b):
        fsdp2.fully_shard(unit, mesh=mesh)
    return fsdp2.fully_shard(model, mesh=mesh)


def microbatches(model: Any, rank: int) -> None:
    for micro in range(2):
        if isinstance(model, fsdp2.FSDPModule):
            model.set_requires_gradient_sync(micro == 1)
        model(batch(micro, rank, 4).requires_grad_()).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_as_in_one_process(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Two steps of two microbatches: the gradients of one process, and every unit resharded at the end."""
    for route in ROUTES:
        plain = Routed(route, use_reentrant)
        model = sharded_routes(plain, mesh_2d(2, world_size // 2) if world_size > 2 else None)
        params = list(model.parameters())
        check(model, plain, rank, world_size, microbatches, times=2)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True)), route


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_stepped_in_backward(rank: int, world_size: int, use_reentrant: bool) -> None:
    """A unit that several reentrant checkpoints use needs its parameters after its step: an error. The rest is right"""
    for route in ("ab", "AB", "aba", "ABA", "AbA", "aabAbB"):
        plain = Routed(route, use_reentrant)
        models = [sharded_routes(plain) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        fsdp2.step_in_backward(optimizers[1])
        if use_reentrant and any(route.lower().count(name) > 1 and name.upper() in route for name in "ab"):
            with pytest.raises(fsdp2.OrderError, match="used in several reentrant checkpoints"):
                microbatches(models[1], rank)
            models[1].reset_iter_state()
            continue
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                microbatches(model, rank)
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*optimizers)
