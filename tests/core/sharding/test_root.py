"""Which unit is the root, when that is decided, and what it decides (tests/behaviour.md, section E)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import events, fully_shard
from tests.helpers.models import (
    error_of,
    is_sharded,
    is_unsharded,
    linears,
    numels,
    reference_grads,
    run_step,
    sharded_copy,
    units,
    wrapped,
)
from tests.helpers.parity_models import Layers, assert_gradients, batch, expect, lines
from tests.helpers.ranks import on_ranks


def shard_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Every child (or entry of `layers`) is a unit, and then the root."""
    for child in getattr(model, "layers", model).children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


@on_ranks(2)
def test_first_to_run_is_root_of_all_below(rank: int, world_size: int) -> None:
    """Behaviour 37: one root_pre_forward and one root_post_backward, both of the module that ran first."""
    model = nn.Sequential(shard_layers(linears(2)), nn.Linear(4, 4))
    fully_shard(model)
    with events.record() as log:
        run_step(model, rank)
    assert units(log, "root_pre_forward") == [""] and units(log, "root_post_backward") == [""]
    assert set(units(log, "pre_forward")) == {"", "0", "0.0", "0.1"}


@on_ranks(2)
def test_names_and_order(rank: int, world_size: int) -> None:
    """Behaviour 38: FQNs relative to the root, which is ``""``; units in the order of the module tree."""
    outer = nn.Sequential(OrderedDict(encoder=nn.Sequential(OrderedDict(layers=linears(2))), decoder=linears(1)))
    root = outer.encoder
    fully_shard(root.layers[1])
    fully_shard(root.layers[0])
    fully_shard(root)
    fully_shard(outer.decoder)
    with events.record() as log:
        outer(batch(0, rank, 4)).sum().backward()
    assert units(log, "pre_forward") == ["", "layers.0", "layers.1", ""]
    assert units(log, "root_pre_forward") == ["", ""]


@on_ranks(2)
def test_units_finish_in_tree_order(rank: int, world_size: int) -> None:
    """Behaviour 38, 51: what no autograd node finishes is finished at the end of backward, root first, in tree
    order."""
    model = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(4))
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return (self.layers["a"](x) + self.layers["b"](x)) * self.own

    parallel = Parallel()
    fully_shard(parallel.layers["a"])
    fully_shard(parallel.layers["b"])
    fully_shard(parallel)
    with events.record() as log:
        run_step(parallel, rank)
    assert units(log, "post_backward") == ["", "layers.b", "layers.a"]


@on_ranks(2)
def test_child_before_root(rank: int, world_size: int) -> None:
    """Behaviour 39: a child that ran alone first is a root; running its parent then is an error naming it."""
    model = shard_layers(linears(2))
    model[1](batch(0, rank, 4))
    text = error_of(RuntimeError, lambda: model(batch(0, rank, 4)))
    assert "'1'" in text and "first" in text
    expect(
        rank,
        wrapped(text),
        """\
'1' ran its forward before the module that contains it and became a root itself. Run the outermost
sharded module's forward first; after that, inner modules may run alone. Call the module itself:
model.forward(...), or a method such as generate, passes its hooks by, unless it is named with
register_fsdp_forward_method.
""",
    )


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_unshard_of_a_child_before_the_root_ran(rank: int, world_size: int, reshard: bool) -> None:
    """Behaviour 39, 79: allowed, and what is gathered is not gathered again."""
    plain = linears(2)
    model = sharded_copy(plain, shard_layers)
    model[1].unshard()
    assert is_unsharded(model[1]) and is_sharded(model[0])
    if reshard:
        model[1].reshard()
        assert is_sharded(model[1])
    with events.record() as log:
        loss = model(batch(0, rank, 4)).square().mean()
    assert units(log, "all_gather") == (["0", "1"] if reshard else ["0"])
    loss.backward()
    assert is_sharded(model)
    assert_gradients(model, reference_grads(plain, world_size))


def _index(log: list[events.Event], kind: str) -> int:
    return [event.kind for event in log].index(kind)


@on_ranks(2)
def test_list_cannot_be_root(rank: int, world_size: int) -> None:
    """Behaviour 40: a unit of several modules has no single forward; the error says what to do."""
    model = linears(2)
    fully_shard([model[0], model[1]])
    expect(
        rank,
        wrapped(error_of(RuntimeError, lambda: model[0](batch(0, rank, 4)))),
        """\
fully_shard was called on a list of 2 modules, and one of them ran forward first; such a unit cannot
be the root. Call fully_shard on the module that contains them, and run that one's forward.
""",
    )


def two_roots(**options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A plain parent of two sharded stacks, whose layers have different names; and the unsharded copy."""
    first = nn.Sequential(OrderedDict(a0=nn.Linear(4, 4), a1=nn.Linear(4, 4)))
    second = nn.Sequential(OrderedDict(b0=nn.Linear(4, 4), b1=nn.Linear(4, 4)))
    plain = nn.Sequential(first, second)
    model = copy.deepcopy(plain)
    for stack in model:
        for layer in stack[:-1]:
            fully_shard(layer, **options)
        fully_shard(stack, **options)
    return model, plain


@on_ranks(2)
def test_two_roots_under_a_plain_parent(rank: int, world_size: int) -> None:
    """Behaviour 41: each is a root, keeps its own parameters after forward, and finishes in the one backward."""
    model, plain = two_roots()
    for step in range(2):
        with events.record() as log:
            loss = model(batch(step, rank, 4)).square().mean()
            for stack in model:
                assert is_unsharded(stack[1]) and is_sharded(stack[0])
            loss.backward()
        assert units(log, "root_pre_forward") == ["", ""] and units(log, "root_post_backward") == ["", ""]
        assert is_sharded(model)
        assert_gradients(model, reference_grads(plain, world_size, step))
        model.zero_grad()


@on_ranks(2)
def test_prefetch_does_not_cross_roots(rank: int, world_size: int) -> None:
    """Behaviour 41: the first stack's layers are gathered only when backward reaches the first stack."""
    model, plain = two_roots(reshard_after_forward=True)
    loss = model(batch(0, rank, 4)).square().mean()
    with events.record() as log:
        loss.backward()
    order = [(event.kind, event.unit) for event in log if event.kind in ("pre_backward", "unshard")]
    second_root = [index for index, each in enumerate(order) if each == ("pre_backward", "")][1]
    assert ("unshard", "b0") in order[:second_root]
    assert ("unshard", "a0") not in order[:second_root]
    assert_gradients(model, reference_grads(plain, world_size))


class AnyInputs(nn.Module):
    """Takes whatever it is given and hands it back beside a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, first: Any, *, second: dict[str, Any], third: object = None) -> tuple[Tensor, Any, object]:
        return self.linear(first[0]) + second["x"], second, third


@on_ranks(2)
def test_inputs_reach_the_root_as_they_are(rank: int, world_size: int) -> None:
    """Behaviour 44: on the CPU nothing is moved: containers and other objects are the caller's own."""
    model = fully_shard(AnyInputs())
    first, second, third = [torch.ones(4)], {"x": torch.ones(4), "y": 3}, object()
    output, same, other = model(first, second=second, third=third)
    assert same is second and other is third
    assert output.shape == (4,)


@pytest.mark.gpu
def test_inputs_move_to_the_accelerator() -> None:
    """Behaviour 16, 44: parameters, buffers and nested inputs go to the mesh's device, ignored parameters do not."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = AnyInputs()
        model.register_buffer("buffer", torch.ones(2))
        model.register_buffer("same_buffer", model.buffer)
        ignored = model.linear.bias
        fully_shard(model, ignored_params={ignored})
        assert model.linear.weight.device.type == "cuda" and model.buffer.device.type == "cuda"
        assert model.same_buffer is model.buffer
        assert model.linear.bias.device.type == "cpu"
        model.linear.bias = nn.Parameter(ignored.detach().cuda())
        output, inner, _ = model([torch.ones(4)], second={"x": torch.ones(4), "y": [torch.ones(1)]})
        assert output.device.type == inner["x"].device.type == inner["y"][0].device.type == "cuda"
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_log_of_one_iteration(rank: int, world_size: int) -> None:
    """Behaviour 37, 38, 43: the whole life of a small model, read as a log."""
    model = shard_layers(Layers(2))
    with events.record() as log:
        run_step(model, rank)
    kinds = ("root_pre_forward", "pre_forward", "post_forward", "unshard", "reshard", "root_post_backward")
    expect(
        rank,
        lines(log[: _index(log, "pre_backward")], *kinds),
        """\
root_pre_forward (root)
pre_forward (root)
unshard (root)
pre_forward layers.0
unshard layers.0
post_forward layers.0
reshard layers.0
pre_forward layers.1
unshard layers.1
post_forward layers.1
reshard layers.1
post_forward (root)
""",
    )
    assert numels(log, "all_gather")[0] == ("", 4)
