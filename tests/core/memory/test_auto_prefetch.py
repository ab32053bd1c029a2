"""Automatic forward prefetch: from the third forward on, what ran next in the last two is gathered ahead."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import events
from fsdp2.comm.gloo import GlooComm
from tests.helpers.models import check_step, is_sharded, units
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Layers, batch
from tests.helpers.ranks import on_ranks
from tests.helpers.schedules import orders
from tests.instruments.races.detector import detecting
from tests.instruments.races.models import make_model, train


class Ordered(nn.Module):
    """Layers in the order that `order` has at the moment."""

    def __init__(self, num_layers: int = 4, dim: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.order: Sequence[int] = range(num_layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for index in self.order:
            x = self.layers[index](x).tanh()
        return x


def sharded(plain: nn.Module | None = None, reshard_after_forward: Any = True, auto: bool = True) -> Any:
    """Every layer and the root, sharded, with automatic prefetch."""
    model = in_units(Layers(4) if plain is None else plain, reshard_after_forward=reshard_after_forward)
    model.set_auto_forward_prefetch(auto)
    return model


def forward_log(model: nn.Module, rank: int, step: int = 0, backward: bool = True) -> list[events.Event]:
    with events.record() as log:
        loss = model(batch(step, rank, 4)).square().sum()
    if backward:
        loss.backward()
    return log


def unsharded_before_use(log: list[events.Event]) -> list[str]:
    """The units that were unsharded before their own forward began."""
    started, ahead = set(), []
    for event in log:
        if event.kind == "pre_forward":
            started.add(event.unit)
        if event.kind == "unshard" and event.unit not in started:
            ahead.append(event.unit)
    return ahead


def collectives(log: list[events.Event]) -> list[tuple[str, str, int]]:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [(event.kind, event.unit, event.numel) for event in log if event.kind in kinds]


def same_on_all_ranks(value: Any) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(other == everyone[0] for other in everyone)


# --- the schedule -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_from_the_third_forward_on(rank: int, world_size: int) -> None:
    """Two equal forwards are recorded; in the third, layer i + 1 is unsharded before layer i computes."""
    model, default = sharded(), orders(sharded(auto=False), rank)
    assert [orders(model, rank), orders(model, rank)] == [default] * 2
    predicted = ("+root +0 +1 -0 +2 -1 +3 -2 -3 -root", default[1])
    assert [orders(model, rank), orders(model, rank)] == [predicted] * 2
    model.set_auto_forward_prefetch(False)
    assert orders(model, rank) == default


@on_ranks(2)
def test_explicit_lists_come_first(rank: int, world_size: int) -> None:
    """Behaviour 66: a unit with a list of its own prefetches that; the others go on by prediction."""
    model = sharded()
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    for _ in range(2):
        forward_log(model, rank)
    log = forward_log(model, rank)
    assert units(log, "unshard")[:4] == ["", "layers.0", "layers.2", "layers.1"]
    assert is_sharded(model)


# --- the order changes ------------------------------------------------------------------------------------------------

CHANGES = {
    "skipped": [0, 2, 3],
    "last_skipped": [0, 1, 2],
    "all_skipped": [],
    "swapped": [0, 2, 1, 3],
    "twice": [0, 1, 1, 2, 3],
    "again_later": [0, 1, 2, 3, 0],
    "reversed": [3, 2, 1, 0],
}


@on_ranks(2, 4)
@pytest.mark.parametrize("change", CHANGES)
def test_another_order_falls_back(rank: int, world_size: int, change: str) -> None:
    """Gradients are right, nothing stays unsharded, ranks agree; two forwards later the new order is predicted."""
    plain = Ordered()
    model = sharded(plain)
    for step in range(3):
        forward_log(model, rank, step)
    assert unsharded_before_use(forward_log(model, rank)) == [f"layers.{index}" for index in range(4)]
    plain.order = model.order = CHANGES[change]
    log = forward_log(model, rank, backward=False)
    assert sorted(units(log, "unshard")) == sorted(units(log, "reshard")), "wrong guesses are resharded in forward"
    with events.record() as log:
        for step in range(2):
            check_step(model, plain, rank, world_size, step)
    assert same_on_all_ranks(collectives(log))
    log = forward_log(model, rank, backward=False)
    expected = [f"layers.{index}" for index in dict.fromkeys(plain.order)]
    assert [unit for unit in unsharded_before_use(log) if unit] == expected
    for step in range(2):
        check_step(model, plain, rank, world_size, step)
    plain.order = model.order = range(4)
    for step in range(3):
        check_step(model, plain, rank, world_size, step)


@on_ranks(2)
def test_wrong_guess_is_not_used_stale(rank: int, world_size: int) -> None:
    """What was prefetched for nothing is gathered again after the optimizer's step."""
    for reshard_after_forward in (True, False, None):
        plain = Ordered()
        model = sharded(plain, reshard_after_forward)
        params = [*plain.parameters(), *model.parameters()]  # as an optimizer holds them
        for _ in range(3):
            forward_log(model, rank)
        model.order = [0, 2, 3]
        forward_log(model, rank)
        with torch.no_grad():
            for param in params:
                param.mul_(1.5)
        model.order = range(4)
        check_step(model, plain, rank, world_size)


@on_ranks(2)
@pytest.mark.parametrize("resets", [True, False])
def test_forward_that_raises_after_a_prefetch(rank: int, world_size: int, resets: bool) -> None:
    """docs/design.md, invariant 7: layer 1 was prefetched when layer 0 raised; the next forward must not use it."""
    plain = Ordered()
    model = sharded(plain)
    params = list(model.parameters())
    for _ in range(3):
        forward_log(model, rank)

    def fail(*_: Any) -> None:
        raise ValueError("a bad batch")

    handle = model.layers[0].register_forward_hook(fail)
    with pytest.raises(ValueError, match="a bad batch"):
        model(batch(0, rank, 4))
    handle.remove()
    if resets:
        model.reset_iter_state()
    with torch.no_grad():
        for mine, theirs in zip(params, plain.parameters(), strict=True):
            mine.grad = None
            mine.mul_(2.0)
            theirs.mul_(2.0)
    for step in range(4):
        check_step(model, plain, rank, world_size, step)


# --- memory -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_two_units_alive_with_streams(rank: int, world_size: int) -> None:
    """docs/design.md, invariants 4 and 5: no more than two units, nothing freed too early, the same numbers."""
    expected = train(in_units(make_model()), rank, steps=6)
    with pytest.MonkeyPatch.context() as monkeypatch, detecting() as detector:
        monkeypatch.setattr(GlooComm, "direct_min_bytes", 4096)  # weights direct, biases packed
        watch = detector.resized
        model = in_units(make_model())
        model.set_auto_forward_prefetch(True)
        actual = train(model, rank, steps=6)
        unit_bytes = sum(param.nbytes for param in make_model()[0].parameters())
        # The packed lane's few biases have a buffer besides.
        assert unit_bytes * 1.9 < watch.most_bytes < unit_bytes * 2.1
        assert watch.num_freed > 0
        assert not watch.alive
        with events.record() as log, torch.no_grad():
            model(torch.zeros(4, 64))
        assert unsharded_before_use(log) == ["0", "1", "2", "3", "4"], "it predicts"
    assert all(map(torch.equal, actual, expected))


# --- with other features ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_activation_checkpointing(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 69: the recomputation is no part of what is predicted."""
    plain = Layers(4, use_reentrant=use_reentrant)
    model = sharded(plain)
    for step in range(5):
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        if step >= 2:
            first_forward = log[: [event.kind for event in log].index("pre_backward")]
            assert unsharded_before_use(first_forward) == [f"layers.{index}" for index in range(4)]
