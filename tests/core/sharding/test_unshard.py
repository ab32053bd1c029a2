"""`reshard_after_forward` in all values, and unsharding by hand (tests/behaviour.md, sections H and I)."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import UnshardHandle, events, fully_shard
from tests.helpers.models import (
    check_step,
    is_sharded,
    is_unsharded,
    linears,
    mlp,
    numels,
    reference_grads,
    run_step,
    sharded_copy,
    units,
)
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import assert_gradients, batch, full
from tests.helpers.ranks import on_ranks
from tests.helpers.threads import run_threads

# --- reshard_after_forward --------------------------------------------------------------------------------------------


@on_ranks(4)
def test_int_reshards_to_a_smaller_mesh(rank: int, world_size: int) -> None:
    """Behaviour 72: (4, 4) over 4 ranks with 2: DTensors on a (2, 2) mesh, two rows each; `reshard` restores one."""
    plain = nn.Linear(4, 4)
    model = sharded_copy(plain, lambda m: fully_shard(m, reshard_after_forward=2))
    sharded = model.weight
    model(batch(0, rank, 4))
    weight = model.weight
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter) and weight is not sharded
    assert weight.placements == (Replicate(), Shard(0)) and tuple(weight.device_mesh.shape) == (2, 2)
    assert weight.shape == (4, 4) and weight.to_local().shape == (2, 4)
    assert torch.equal(weight.to_local(), plain.weight[2 * (rank % 2) :][:2])
    assert torch.equal(full(weight), plain.weight)
    model.reshard()
    assert model.weight is sharded and sharded.to_local().shape == (1, 4)


@on_ranks(4)
@pytest.mark.parametrize("features", [(4, 4, 4), (5, 3, 5)])
def test_int_gathers_in_the_smaller_group(rank: int, world_size: int, features: tuple[int, ...]) -> None:
    """Behaviour 74: forward gathers over 4 ranks, backward over 2, to the same number of elements when even."""
    plain = mlp(*features)
    model = in_units(plain, reshard_after_forward=2)
    with events.record() as log:
        check_step(model, plain, rank, world_size, dim=features[0])
    gathers = [(event.unit, event.numel, event.group_size) for event in log if event.kind == "all_gather"]
    assert [(unit, size) for unit, _, size in gathers] == [("0", 4), ("2", 4), ("2", 2), ("0", 2)]
    assert {event.group_size for event in log if event.kind == "reduce_scatter"} == {4}
    if features == (4, 4, 4):
        assert {numel for _, numel, _ in gathers} == {20}


def test_int_with_hsdp() -> None:
    """Behaviour 74: on a 2 x 4 mesh with 2: gathered in pairs in backward, reduced over 4 and then over 2."""
    plain = nn.Linear(8, 8)

    def step(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = sharded_copy(plain, lambda m: fully_shard(m, mesh=mesh, reshard_after_forward=2))
        model(batch(0, rank, 8))
        assert model.weight.placements == (Replicate(), Shard(0)) and model.weight.to_local().shape == (4, 8)
        model.reset_iter_state()
        check(model, copy.deepcopy(plain), rank, world_size, partial(run_step, dim=8))

    run_threads(8, step)


@on_ranks(4)
def test_int_of_the_whole_axis_is_true_and_of_one_is_false(rank: int, world_size: int) -> None:
    """Behaviour 73: k = S; k = 1 warns and keeps the parameters."""
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=4)
    sharded = model.weight
    with events.record() as log:
        loss = model(batch(0, rank, 4)).sum()
        assert model.weight is sharded
        loss.backward()
    assert [event.group_size for event in log if event.kind == "all_gather"] == [4, 4]
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        model = fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
    model(batch(0, rank, 4))
    assert is_unsharded(model)


@on_ranks(2)
def test_reshard_between_forward_and_backward(rank: int, world_size: int) -> None:
    """Behaviour 76: everything is gathered again, and reduced once."""
    plain = linears(3)
    model = in_units(plain, reshard_after_forward=False)
    loss = model(batch(0, rank, 4)).square().mean()
    assert is_unsharded(model)
    for module in (model, *model):
        module.reshard()
    assert is_sharded(model)
    with events.record() as log:
        loss.backward()
    assert sorted(units(log, "all_gather")) == sorted(units(log, "reduce_scatter")) == ["0", "1", "2"]
    assert_gradients(model, reference_grads(plain, world_size))


# --- unshard and reshard ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("first", ["wait", "forward"])
def test_async_unshard(rank: int, world_size: int, first: str) -> None:
    """Behaviour 78, 79: parameters stay sharded until `wait`, or the next forward, which does not gather again."""
    plain = linears(1)
    model = sharded_copy(plain, lambda m: fully_shard(m, reshard_after_forward=False))
    with events.record() as log:
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        assert is_sharded(model)
        if first == "wait":
            assert handle.wait() is None
            assert is_unsharded(model)
            assert torch.equal(model[0].weight, plain[0].weight)
        run_step(model, rank)
    assert units(log, "all_gather") == [""]
    assert is_sharded(model)
    handle.wait()
    handle.wait()
    assert is_sharded(model), "an old handle unshards nothing"
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
def test_unshard_never_gathers_twice(rank: int, world_size: int) -> None:
    """Behaviour 79: neither again by hand, nor under way, nor in the forward that follows."""
    model = linears(1)
    fully_shard(model, reshard_after_forward=False)
    with events.record() as log:
        for async_op in (True, True, False, True, False):
            model.unshard(async_op=async_op)
        model(batch(0, rank, 4))
        model.unshard()
    assert numels(log, "all_gather") == [("", 20)] and units(log, "unshard") == [""]


@on_ranks(2)
def test_any_member_acts_for_a_list(rank: int, world_size: int) -> None:
    """Behaviour 80: unshard by one member, reshard by another."""
    model = linears(3)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    model[0].unshard()
    assert is_unsharded(model[0]) and is_unsharded(model[1]) and is_sharded(model[2])
    model[1].reshard()
    assert is_sharded(model)


@on_ranks(2, 4)
@pytest.mark.parametrize("ahead", [1, 2, 9])
@pytest.mark.parametrize("raf", [True, False])
def test_unsharding_ahead(rank: int, world_size: int, ahead: int, raf: bool) -> None:
    """Behaviour 81: asynchronously unsharding some or all of the next modules keeps the gradients of one process."""
    plain = linears(4)
    model = in_units(plain, reshard_after_forward=raf)
    layers = list(model)

    def unshard_next(index: int) -> None:
        for layer in layers[index + 1 : index + 1 + ahead]:
            layer.unshard(async_op=True)

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: unshard_next(index), prepend=True)
    for step in range(2):
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        gathers = units(log, "all_gather")
        assert sorted(gathers[:4]) == ["0", "1", "2", "3"]
        assert len(gathers) == (8 if raf else 4), "never twice in one pass"
