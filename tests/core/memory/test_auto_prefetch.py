"""Automatic forward prefetch: from the third forward on, what ran next in the last two is gathered ahead, without
lists. Where the order changes, nothing is lost but the overlap."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import events, fully_shard
from fsdp2.comm.gloo import GlooComm
from tests.helpers.models import check_step, is_sharded, units
from tests.helpers.parity_models import Layers, batch, expect, full, lines, run_logged, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.instruments.races.detector import detecting
from tests.instruments.races.models import make_model, train

FORMS = ("unshard", "reshard")


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
    torch.manual_seed(0)
    model: Any = Layers(4) if plain is None else copy.deepcopy(plain)
    shard_blocks(fsdp2, model, reshard_after_forward=reshard_after_forward)
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
    """Two equal forwards are recorded; in the third, unit i + 1 is unsharded before unit i computes, hence
    before it is resharded. Backward does not change."""
    model = sharded()
    default = run_logged(sharded(auto=False), rank, *FORMS)
    assert run_logged(model, rank, *FORMS) == default
    assert run_logged(model, rank, *FORMS) == default
    forward, backward = run_logged(model, rank, *FORMS)
    expect(
        rank,
        forward,
        """\
unshard (root)
unshard layers.0
unshard layers.1
reshard layers.0
unshard layers.2
reshard layers.1
unshard layers.3
reshard layers.2
reshard layers.3
reshard (root)
""",
    )
    assert backward == default[1]
    assert run_logged(model, rank, *FORMS)[0] == forward
    model.set_auto_forward_prefetch(False)
    assert run_logged(model, rank, *FORMS) == default


@on_ranks(2)
def test_prefetch_is_issued_before_the_unit_computes(rank: int, world_size: int) -> None:
    """At the moment when layer i computes, the all-gather of layer i + 1 has been issued, and its module
    still holds shards."""
    model = sharded()
    issued: list[tuple[int, bool, bool]] = []
    with events.record() as log:
        for index, layer in enumerate(model.layers):

            def note(_module: nn.Module, _args: Any, index: int = index) -> None:
                following = f"layers.{index + 1}"
                is_last = index + 1 == len(model.layers)
                has_shards = is_last or isinstance(model.layers[index + 1].weight, DTensor)
                issued.append((index, following in units(log, "all_gather"), has_shards))

            layer.register_forward_pre_hook(note)
        for _ in range(3):
            log.clear()
            issued.clear()
            with torch.no_grad():
                model(batch(0, rank, 4))
    assert issued == [(0, True, True), (1, True, True), (2, True, True), (3, False, True)]


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


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("bf16", [False, True])
def test_numbers_are_those_without(rank: int, world_size: int, reshard_after_forward: bool | None, bf16: bool) -> None:
    """Bit by bit the same parameters after six steps, eval forwards between them included."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    results = []
    for auto in (True, False):
        torch.manual_seed(0)
        model: Any = shard_blocks(fsdp2, Ordered(), reshard_after_forward=reshard_after_forward, mp_policy=policy)
        model.set_auto_forward_prefetch(auto)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(6):
            model(batch(step, rank, 4)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                with torch.no_grad():
                    model.eval()(batch(100, rank, 4))
                model.train()
        model.reshard()
        for layer in model.layers:
            layer.reshard()
        results.append([full(param.detach()) for param in model.parameters()])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


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
    """Gradients are right in the forward in which the order changes and after it, nothing stays unsharded,
    all ranks issue the same collectives, and two equal forwards later it predicts again, the new order."""
    torch.manual_seed(0)
    plain = Ordered()
    model = sharded(plain)
    for step in range(3):
        forward_log(model, rank, step)
    assert unsharded_before_use(forward_log(model, rank)) == [f"layers.{index}" for index in range(4)]
    plain.order = model.order = CHANGES[change]
    with events.record() as log:
        for step in range(2):
            check_step(model, plain, rank, world_size, step)
    assert same_on_all_ranks(collectives(log))
    log = forward_log(model, rank, backward=False)
    assert is_sharded(model), "wrong guesses are resharded at the end of forward"
    expected = [f"layers.{index}" for index in dict.fromkeys(plain.order)]
    assert [unit for unit in unsharded_before_use(log) if unit] == expected
    for step in range(2):
        check_step(model, plain, rank, world_size, step)
    plain.order = model.order = range(4)
    for step in range(3):
        check_step(model, plain, rank, world_size, step)


@on_ranks(2)
def test_wrong_guess_is_given_back_at_the_end_of_forward(rank: int, world_size: int) -> None:
    """Layer 1 is prefetched and does not run; after the first difference nothing more is predicted."""
    model = sharded(Ordered())
    for _ in range(3):
        forward_log(model, rank)
    model.order = [0, 2, 3]
    forward = lines(forward_log(model, rank, backward=False), *FORMS)
    expect(
        rank,
        forward,
        """\
unshard (root)
unshard layers.0
unshard layers.1
reshard layers.0
unshard layers.2
reshard layers.2
unshard layers.3
reshard layers.3
reshard (root)
reshard layers.1
""",
    )
    assert is_sharded(model)


@on_ranks(2)
def test_nothing_is_predicted_after_a_difference(rank: int, world_size: int) -> None:
    """In a forward in another order there is one wrong guess, the root's, and no second one."""
    model = sharded(Ordered())
    for _ in range(3):
        forward_log(model, rank)
    model.order = [3, 1, 2, 0]
    assert unsharded_before_use(forward_log(model, rank, backward=False)) == ["layers.0"]


@on_ranks(2)
def test_wrong_guess_is_not_used_stale(rank: int, world_size: int) -> None:
    """What was prefetched for nothing is gathered again after the optimizer's step, also where units stay
    unsharded after forward."""
    for reshard_after_forward in (True, False, None):
        model = sharded(Ordered(), reshard_after_forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            forward_log(model, rank)
        model.order = [0, 2, 3]
        forward_log(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.layers[1].parameters():
                assert isinstance(param, DTensor)
                param.mul_(3.0)
        plain = Ordered()
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(full(model.get_parameter(name)))
        model.order = plain.order = range(4)
        check_step(model, plain, rank, world_size)


@on_ranks(2)
@pytest.mark.parametrize(
    "resets",
    [
        True,
        False,
    ],
)
def test_forward_that_raises_after_a_prefetch(rank: int, world_size: int, resets: bool) -> None:
    """docs/design.md, invariant 7: layer 1 was prefetched when layer 0 raised. The next forward must not compute with
    it when parameters have changed, with or without `reset_iter_state`."""
    torch.manual_seed(0)
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
    """docs/design.md, invariants 4 and 5: with the streams of an accelerator simulated, prediction keeps the bound of
    two units, frees nothing that compute may read, and gives the same numbers."""
    expected = train(shard_all(make_model()), rank, steps=6)
    with pytest.MonkeyPatch.context() as monkeypatch, detecting() as detector:
        monkeypatch.setattr(GlooComm, "direct_min_bytes", 4096)  # weights direct, biases packed
        watch = detector.resized
        model = shard_all(make_model())
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
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


def shard_all(model: nn.Module) -> Any:
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(model)


# --- with other features ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_activation_checkpointing(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 69: the recomputation is no part of what is predicted."""
    torch.manual_seed(0)
    plain = Layers(4, use_reentrant=use_reentrant)
    model = sharded(plain)
    for step in range(5):
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        if step >= 2:
            first_forward = log[: [event.kind for event in log].index("pre_backward")]
            assert unsharded_before_use(first_forward) == [f"layers.{index}" for index in range(4)]
