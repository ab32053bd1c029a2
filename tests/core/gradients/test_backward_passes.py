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


def two_forwards(model: nn.Module, rank: int, dim: int = 4) -> None:
    (model(batch(0, rank, dim)).square().sum() + model(batch(1, rank, dim)).square().sum()).backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
def test_two_forwards_one_backward(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 57: gradients of both forwards, reduced once; afterwards everything is sharded again."""
    plain = Layers(3)
    model = in_units(plain, reshard_after_forward=raf)
    with events.record() as log:
        check(model, plain, rank, world_size, two_forwards, times=2)
    assert count(log, "reduce_scatter") == {"reduce_scatter": 2 * 4}
    assert is_sharded(model)


@on_ranks(2)
def test_order_of_two_forwards_one_backward(rank: int, world_size: int) -> None:
    """Behaviour 57: what the first sweep of backward resharded, the second one gathers again."""
    model = in_units(Layers(2), reshard_after_forward=False)
    with events.record() as log:
        two_forwards(model, rank)
    found = [f"{event.kind} {event.unit}" for event in log if event.kind in ("unshard", "post_backward")]
    assert found == [
        *("unshard ", "unshard layers.0", "unshard layers.1"),
        *("post_backward layers.1", "post_backward layers.0", "unshard layers.1", "unshard layers.0"),
        *("post_backward layers.1", "post_backward layers.0", "post_backward "),
    ]


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


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
def test_retain_graph(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 60: a second backward of the same graph works and adds the same gradients again."""

    def twice(m: nn.Module, r: int) -> None:
        loss = m(batch(0, r, 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    plain = Layers(3)
    model = in_units(plain, reshard_after_forward=raf)
    check(model, plain, rank, world_size, twice, times=2)
    assert is_sharded(model)


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_not_the_last_backward(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 63, 105: set on the root for its whole tree; each backward reduces, sums are right at the end."""
    plain = Layers(3)
    model = in_units(plain, reshard_after_forward=raf)

    def three(m: nn.Module, r: int) -> None:
        for step in range(3):
            with events.record() as log:
                if m is model:
                    model.set_is_last_backward(step == 2)
                m(batch(step, r, 4)).square().sum().backward()
            assert m is plain or count(log, "reduce_scatter") == {"reduce_scatter": 4}

    check(model, plain, rank, world_size, three, times=2)


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


@on_ranks(2, 4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_as_in_one_process(rank: int, world_size: int, route: str, use_reentrant: bool) -> None:
    """Two steps of two microbatches: the gradients of one process, and every unit resharded at the end."""
    plain = Routed(route, use_reentrant)
    model = sharded_routes(plain, mesh_2d(2, world_size // 2) if world_size > 2 else None)
    params = list(model.parameters())

    def microbatches(m: Any, r: int) -> None:
        for micro in range(2):
            if m is model:
                model.set_requires_gradient_sync(micro == 1)
            m(batch(micro, r, 4).requires_grad_()).square().sum().backward()

    for _ in range(2):
        microbatches(model, rank)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert_gradients(model, mean_gradients(plain, world_size, microbatches))
        model.zero_grad()
