"""The order of unshard, reshard and reduction over a forward and a backward (tests/behaviour.md, section F).

`Layers` multiplies by a parameter of the root first, so every layer's input needs a gradient, unless it has no
`root_weight`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.models import reference_grads, run_step, units
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Layers, assert_gradients, batch, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.helpers.schedules import order, orders


@on_ranks(2)
def test_default(rank: int, world_size: int) -> None:
    """Behaviour 43, 47-49: backward fetches one layer ahead, reduces after a layer's last gradient, then reshards."""
    model = in_units(Layers(3))
    for _ in range(2):
        forward, backward = orders(model, rank, "reduce_scatter")
        assert forward == "+root +0 -0 +1 -1 +2 -2"
        assert backward == "+2 +1 ~2 -2 +0 ~1 -1 ~0 -0 ~root -root"


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, 2])
def test_reshard_all(rank: int, world_size: int, raf: bool | int) -> None:
    """Behaviour 47, 48, 50: the root is resharded last; its pre-backward gathers it and prefetches the last layer. With
    False nothing is resharded in forward, and nothing unsharded in backward."""
    forward, backward = orders(in_units(Layers(3), reshard_after_forward=raf), rank)
    assert forward.endswith("-2 -root")
    assert backward == "+root +2 +1 -2 +0 -1 -0 -root"
    kept = orders(in_units(Layers(3), reshard_after_forward=False), rank)
    assert kept == ("+root +0 +1 +2", "-2 -1 -0 -root")


class Late(Layers):
    """The root's parameter comes last, so that the input of layer 0 needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@on_ranks(2)
def test_end_of_backward_in_pre_order(rank: int, world_size: int) -> None:
    """Behaviour 38, 51: in the callback at the end of backward, the root comes before its first layer."""
    model = in_units(Late(2), reshard_after_forward=True)
    _, backward = orders(model, rank, "post_backward")
    assert backward == "+root +1 +0 post_backward:1 -1 post_backward:root -root post_backward:0 -0"
    with events.record() as log:
        run_step(model, rank)
    assert order(log, ("reduce_scatter", "root_post_backward")) == "~root ~1 ~0 root_post_backward:root"


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_keeps_the_order(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 49, 58, 175: recomputing adds no gathers; after a reentrant forward nothing knows backward's order."""
    model = in_units(Layers(3, use_reentrant=use_reentrant))
    for _ in range(2):
        _, backward = orders(model, rank)
        one_by_one = "+2 -2 +1 -1 +0 -0 -root"
        assert backward == (one_by_one if use_reentrant else "+2 +1 -2 +0 -1 -0 -root")


# --- explicit prefetch (section G) ------------------------------------------------------------------------------------


def sharded(num_layers: int) -> Any:
    return in_units(Layers(num_layers), reshard_after_forward=True)


@on_ranks(2)
def test_forward_prefetch(rank: int, world_size: int) -> None:
    """Behaviour 66: two layers ahead, gathered right after the module's own, before it computes."""
    model = sharded(4)
    layers = list(model.layers)
    for i, layer in enumerate(layers[:-1]):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
    forward, backward = orders(model, rank)
    assert forward == "+root +0 +1 +2 -0 +3 -1 -2 -3 -root"
    assert backward == orders(sharded(4), rank)[1]


@on_ranks(2)
def test_forward_prefetch_changes_with_the_next_forward(rank: int, world_size: int) -> None:
    """Behaviour 67: another list holds from the next forward on; what is unsharded already is not gathered twice."""
    model = sharded(3)
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    assert orders(model, rank)[0] == "+root +0 +1 -0 -1 +2 -2 -root"
    model.set_modules_to_forward_prefetch([third])
    assert orders(model, rank)[0] == "+root +2 +0 +1 -0 -1 -2 -root"
    model.set_modules_to_forward_prefetch([])
    first.set_modules_to_forward_prefetch([])
    assert orders(model, rank) == orders(sharded(3), rank)


@on_ranks(2)
def test_backward_prefetch(rank: int, world_size: int) -> None:
    """Behaviour 68: two layers ahead in backward; the root keeps prefetching by the recorded order."""
    model = sharded(4)
    layers = list(model.layers)
    for i, layer in enumerate(layers[1:], 1):
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    assert orders(model, rank)[1] == "+root +3 +2 +1 -3 +0 -2 -1 -0 -root"
    for layer in layers:
        layer.set_modules_to_backward_prefetch([])
    assert orders(model, rank) == orders(sharded(4), rank)


class Pair(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x).sum(1, keepdim=True)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointed_child_outside_the_list(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 69: a child that the explicit list forgot is gathered when the recompute reaches it, once."""
    plain: Any = Layers(2, use_reentrant=use_reentrant)
    plain.layers = nn.ModuleList(Pair(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    model: Any = copy.deepcopy(plain)
    for pair in model.layers:
        fully_shard(pair.a)
        fully_shard(pair.b)
    shard_blocks(fsdp2, model)
    model.layers[1].set_modules_to_backward_prefetch([model.layers[1].b])
    loss = model(batch(0, rank, 4)).square().mean()
    with events.record() as log:
        loss.backward()
    unsharded = units(log, "unshard")
    assert unsharded.index("layers.1.b") < unsharded.index("layers.1.a") or use_reentrant
    assert len(set(unsharded)) == len(unsharded)
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(4)
def test_prefetch_of_a_unit_with_two_groups(rank: int, world_size: int) -> None:
    """Behaviour 29, 71: a unit on two meshes gathers group by group, in backward in reverse order."""
    halves = mesh_2d(2, 2)["shard"]

    def place(param: nn.Parameter) -> fsdp2.ShardPlacementResult | None:
        return fsdp2.ShardPlacementResult(Shard(0), halves) if param.numel() == 8 else None

    plain: Any = Layers(3)
    plain.layers = nn.ModuleList(Pair(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)) for _ in range(3))
    model = in_units(plain, shard_placement_fn=place)
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
    found = order(log, ("unshard", "post_backward")).removeprefix("+0 +1, 2 ")
    assert found == "+1, 2 +0 post_backward:1, 2 post_backward:0 post_backward:root"


@on_ranks(2)
def test_forward_prefetch_is_not_for_recomputation(rank: int, world_size: int) -> None:
    """Under reentrant checkpoints each recomputed layer gathered the next one again, until all were in memory."""
    model = in_units(Layers(4, use_reentrant=True))
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    _, backward = orders(model, rank)
    assert backward == "+3 -3 +2 -2 +1 -1 +0 -0 -root"
