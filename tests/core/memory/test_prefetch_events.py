"""Explicit prefetch: which units are gathered ahead of use, in which order (tests/behaviour.md, section G)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.parity_models import (
    Layers,
    assert_gradients,
    batch,
    expect,
    mean_gradients,
    mesh_2d,
    run_logged,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks

FORMS = ("unshard", "reshard")


def sharded(num_layers: int) -> Any:
    return shard_blocks(fsdp2, Layers(num_layers), reshard_after_forward=True)


@on_ranks(2)
def test_forward_prefetch(rank: int, world_size: int) -> None:
    """Behaviour 66: two layers ahead, gathered right after the module's own, before it computes."""
    model = sharded(4)
    layers = list(model.layers)
    for i, layer in enumerate(layers[:-1]):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
    forward, backward = run_logged(model, rank, *FORMS)
    expect(
        rank,
        forward,
        """\
unshard (root)
unshard layers.0
unshard layers.1
unshard layers.2
reshard layers.0
unshard layers.3
reshard layers.1
reshard layers.2
reshard layers.3
reshard (root)
""",
    )
    default_backward = run_logged(sharded(4), rank, *FORMS)[1]
    assert backward == default_backward


@on_ranks(2)
def test_forward_prefetch_changes_with_the_next_forward(rank: int, world_size: int) -> None:
    """Behaviour 67: another list holds from the next forward on; what is unsharded already is not gathered twice."""
    model = sharded(3)
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    forward, _ = run_logged(model, rank, "unshard")
    assert forward.split() == ["unshard", "(root)", "unshard", "layers.0", "unshard", "layers.1", "unshard", "layers.2"]
    model.set_modules_to_forward_prefetch([third])
    forward, _ = run_logged(model, rank, "unshard")
    assert forward.split() == ["unshard", "(root)", "unshard", "layers.2", "unshard", "layers.0", "unshard", "layers.1"]
    model.set_modules_to_forward_prefetch([])
    first.set_modules_to_forward_prefetch([])
    assert run_logged(model, rank, *FORMS) == run_logged(sharded(3), rank, *FORMS)


@on_ranks(2)
def test_backward_prefetch(rank: int, world_size: int) -> None:
    """Behaviour 68: two layers ahead in backward; the root keeps prefetching by the recorded order."""
    model = sharded(4)
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        if i > 0:
            layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    _, backward = run_logged(model, rank, *FORMS)
    expect(
        rank,
        backward,
        """\
unshard (root)
unshard layers.3
unshard layers.2
unshard layers.1
reshard layers.3
unshard layers.0
reshard layers.2
reshard layers.1
reshard layers.0
reshard (root)
""",
    )
    for layer in layers:
        layer.set_modules_to_backward_prefetch([])
    assert run_logged(model, rank, *FORMS) == run_logged(sharded(4), rank, *FORMS)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointed_child_outside_the_list(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 69: a child that the explicit list forgot is gathered when the recompute reaches it; nothing is
    lost."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model: Any = Layers(2, use_reentrant=use_reentrant)
    model.layers = nn.ModuleList([Pair(), Pair()])
    plain = copy.deepcopy(model)
    for pair in model.layers:
        fully_shard(pair.a)
        fully_shard(pair.b)
    shard_blocks(fsdp2, model)
    model.layers[1].set_modules_to_backward_prefetch([model.layers[1].b])
    loss = model(batch(0, rank, 4)).sum()
    with events.record() as log:
        loss.backward()
    unsharded = [event.unit for event in log if event.kind == "unshard"]
    assert unsharded.index("layers.1.b") < unsharded.index("layers.1.a") or use_reentrant
    assert len(set(unsharded)) == len(unsharded)
    assert_gradients(model, mean_gradients(plain, world_size, lambda m, rank: m(batch(0, rank, 4)).sum().backward()))


@on_ranks(4)
def test_prefetch_of_a_unit_with_two_groups(rank: int, world_size: int) -> None:
    """Behaviour 29, 71: a unit on two meshes gathers group by group, in backward in reverse order."""
    halves = mesh_2d(2, 2)["shard"]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(x) + self.narrow(x).sum(1, keepdim=True)

    def place(param: nn.Parameter) -> fsdp2.ShardPlacementResult | None:
        return fsdp2.ShardPlacementResult(Shard(0), halves) if param.numel() == 8 else None

    model = Layers(3)
    model.layers = nn.ModuleList(Pair() for _ in range(3))
    shard_blocks(fsdp2, model, shard_placement_fn=place)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])

    def gathers(log: list[events.Event]) -> list[tuple[str, int]]:
        return [(event.unit, event.group_size) for event in log if event.kind == "all_gather"]

    with events.record() as log:
        loss = model(batch(0, rank, 4)).sum()
    in_order = [(f"layers.{layer}", ranks) for layer in (0, 2, 1) for ranks in (4, 2)]
    assert gathers(log) == [("", 4), *in_order]
    with events.record() as log:
        loss.backward()
    assert gathers(log) == [(f"layers.{layer}", ranks) for layer in (2, 1, 0) for ranks in (2, 4)]


@on_ranks(2)
def test_list_of_modules_lost_its_prefetch(rank: int, world_size: int) -> None:
    """Each module of a list was recorded by itself, so the unit that ran before the second one was the unit itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard([model[1], model[2]], reshard_after_forward=True)
    fully_shard(model)
    for _ in range(2):
        with events.record() as log:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    order = [f"{e.kind} {e.unit}" for e in log if e.kind in ("unshard", "post_backward")]
    assert (
        order[2:]
        == ["unshard 1, 2", "unshard 0", "post_backward 1, 2", "post_backward 0", "post_backward "][: len(order) - 2]
    )


@on_ranks(2)
def test_forward_prefetch_is_not_for_recomputation(rank: int, world_size: int) -> None:
    """Under reentrant checkpoints each recomputed layer gathered the next one again, until all were in memory."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model: Any = Checkpointed()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    loss = model(torch.ones(2, 8, requires_grad=True)).sum()
    with events.record() as log:
        loss.backward()
    assert [event.unit for event in log if event.kind == "unshard"] == [f"layers.{i}" for i in (3, 2, 1, 0)]
