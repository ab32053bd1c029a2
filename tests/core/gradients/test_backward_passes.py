"""Several forwards, several backwards: in one iteration, on one graph, unfinished on purpose (Behaviour 57-60, 63,
64)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.parity_models import (
    Gradients,
    Layers,
    Stack,
    assert_gradients,
    batch,
    count,
    expect,
    full,
    lines,
    local,
    mean_gradients,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


def sharded_copy(plain: nn.Module, **options: Any) -> Any:
    return shard_blocks(fsdp2, copy.deepcopy(plain), **options)


def two_forwards(model: nn.Module, rank: int, dim: int) -> Tensor:
    return model(batch(0, rank, dim)).square().sum() + model(batch(1, rank, dim)).square().sum()


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
def test_two_forwards_one_backward(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 57: gradients of both forwards, reduced once; afterwards everything is sharded again."""
    plain = Layers(3)
    model = sharded_copy(plain, reshard_after_forward=raf)
    expected = mean_gradients(plain, world_size, lambda m, r: two_forwards(m, r, 4).backward())
    for _ in range(2):
        model.zero_grad()
        loss = two_forwards(model, rank, 4)
        with events.record() as log:
            loss.backward()
        assert count(log, "reduce_scatter") == {"reduce_scatter": 4}
        assert_gradients(model, expected)
        assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_order_of_two_forwards_one_backward(rank: int, world_size: int) -> None:
    """Behaviour 57, raf=False: the second forward gathers nothing; the layers go through backward twice, the root once.

    What the first sweep resharded, the second one gathers again.
    """
    model = sharded_copy(Layers(2), reshard_after_forward=False)
    model(batch(0, rank, 4))
    with events.record() as log:
        model(batch(1, rank, 4))
    assert lines(log, "unshard") == ""
    loss = two_forwards(model, rank, 4)
    with events.record() as log:
        loss.backward()
    expect(
        rank,
        lines(log, "unshard", "post_backward"),
        """\
post_backward layers.1
post_backward layers.0
unshard layers.1
unshard layers.0
post_backward layers.1
post_backward layers.0
post_backward (root)
""",
    )


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_two_forwards_one_backward_checkpointed(rank: int, world_size: int, raf: bool, use_reentrant: bool) -> None:
    """Behaviour 58: the recompute gathers what an earlier post-backward resharded, in nested units too."""
    plain = Stack(depth=2, use_reentrant=use_reentrant)
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block.down, reshard_after_forward=raf)
    shard_blocks(fsdp2, model, reshard_after_forward=raf)
    for _ in range(2):
        model.zero_grad()
        two_forwards(model, rank, 8).backward()
        assert_gradients(model, mean_gradients(plain, world_size, lambda m, r: two_forwards(m, r, 8).backward()))
        assert all(isinstance(param, DTensor) for param in model.parameters())


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
    model = sharded_copy(plain)
    for _ in range(2):
        model.zero_grad()
        out = model(batch(0, rank, 4))
        with events.record() as log:
            (out[0].sum() + out[2].square().sum()).backward()
        assert "unshard layers.1" in lines(log, "unshard")
        assert "layers.1" not in lines(log, "reduce_scatter")
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert model.layers[1].weight.grad is None
        expected = mean_gradients(
            plain,
            world_size,
            lambda m, r: (m(batch(0, r, 4))[0].sum() + m(batch(0, r, 4))[2].square().sum()).backward(),
        )
        assert_gradients(model, expected)


@on_ranks(2)
def test_prefetch_for_a_later_backward(rank: int, world_size: int) -> None:
    """Behaviour 59: before a backward that is not the last, the prefetched unit stays, and the next backward uses
    it."""
    plain = Branches()
    model = sharded_copy(plain)
    out = model(batch(0, rank, 4))
    model.set_is_last_backward(False)
    out[2].square().sum().backward()
    model.set_is_last_backward(True)
    with events.record() as log:
        out[1].sum().backward()
    assert "layers.1" not in lines(log, "unshard")

    def both(m: nn.Module, r: int) -> None:
        out = m(batch(0, r, 4))
        (out[2].square().sum() + out[1].sum()).backward()

    assert_gradients(model, mean_gradients(plain, world_size, both))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
def test_retain_graph(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 60: a second backward of the same graph works and adds the same gradients again."""
    plain = Layers(3)
    model = sharded_copy(plain, reshard_after_forward=raf)

    def twice(m: nn.Module, r: int) -> None:
        loss = m(batch(0, r, 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(2):
        model.zero_grad()
        twice(model, rank)
        assert_gradients(model, mean_gradients(plain, world_size, twice))
        assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_not_the_last_backward(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 63, 105: set on the root for its whole tree; reductions run in each backward, sums are right at the
    end."""
    plain = Layers(3)
    model = sharded_copy(plain, reshard_after_forward=raf)

    def three(m: nn.Module, r: int) -> None:
        for step in range(3):
            if m is model:
                model.set_is_last_backward(step == 2)
            with events.record() as log:
                m(batch(step, r, 4)).square().sum().backward()
            if m is model:
                assert count(log, "reduce_scatter") == {"reduce_scatter": 4}

    for _ in range(2):
        model.zero_grad()
        three(model, rank)
        assert_gradients(model, mean_gradients(plain, world_size, three))


@on_ranks(2, 4)
def test_async_unshard_is_the_same(rank: int, world_size: int) -> None:
    """Behaviour 64: `_set_unshard_async_op` changes when one waits, not what comes out."""
    plain = Stack()
    models = [sharded_copy(plain) for _ in range(2)]
    models[1]._set_unshard_async_op(True)
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        losses = []
        for model, optim in zip(models, optims, strict=True):
            loss = model(batch(step, rank)).square().sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(losses[0], losses[1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(one), local(other))


@on_ranks(2)
def test_gradients_with_respect_to_inputs(rank: int, world_size: int) -> None:
    """Behaviour 48, 51: `torch.autograd.grad` for the input alone, and hooks on it, see what the plain model gives."""
    plain = Layers(2)
    model = sharded_copy(plain, reshard_after_forward=True)
    for _ in range(2):
        x = batch(0, rank, 4).requires_grad_()
        expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
        got: list[Tensor] = []
        x.register_hook(got.append)
        model(x).square().sum().backward()
        assert_close(got[0], expected)
        (input_only,) = torch.autograd.grad(model(x).square().sum(), x)
        assert_close(input_only, expected)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.zero_grad()


@on_ranks(2)
def test_child_alone_after_the_root(rank: int, world_size: int) -> None:
    """Behaviour 42: once the root has run, a child may run by itself; it reduces its own gradients, others do
    nothing."""
    plain = Layers(3)
    model = sharded_copy(plain)
    model(batch(0, rank, 4)).sum().backward()
    model.zero_grad()
    model.reshard()
    with events.record() as log:
        model.layers[1](batch(1, rank, 4)).square().sum().backward()
    assert {event.unit for event in log if event.kind in ("all_gather", "reduce_scatter")} == {"layers.1"}

    def child(m: nn.Module, r: int) -> None:
        m.layers[1](batch(1, r, 4)).square().sum().backward()

    expected: Gradients = mean_gradients(plain, world_size, child)
    assert_gradients(model, expected)
    assert_close(full(model.layers[1].weight), plain.layers[1].weight)
