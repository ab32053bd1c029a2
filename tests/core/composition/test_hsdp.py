"""HSDP: sharding over one axis of a 2-D mesh, replication over the other (Behaviour 106-111)."""

import copy
import re
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from tests.helpers.models import Dot, add, grads
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import Layers, batch, count, local, mesh_2d
from tests.helpers.ranks import on_ranks


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 4)).square().sum().backward()


@on_ranks(4)
def test_axes(rank: int, world_size: int) -> None:
    """Behaviour 20, 106: dim 0 replicates, dim 1 shards; gathers go over the shards, all-reduces over the replicas."""
    model: Any = fully_shard(nn.Linear(4, 6), mesh=mesh_2d(2, 2))
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.to_local().shape == (3, 4)
    with events.record() as log:
        backward(model, 0, rank)
    assert [(e.kind, e.numel, e.group_size) for e in log if e.group_size] == [
        ("all_gather", 30, 2),
        ("reduce_scatter", 15, 2),
        ("all_reduce", 15, 2),
    ]


@on_ranks(4)
def test_all_reduce_follows_its_reduce_scatter(rank: int, world_size: int) -> None:
    """Behaviour 106, 112: one all-reduce a group, after the group's reduce-scatter, without waiting for the end."""
    model = in_units(Layers(2), mesh=mesh_2d(2, 2))
    with events.record() as log:
        backward(model, 0, rank)
    found = [(e.kind, e.unit) for e in log if e.kind in ("reduce_scatter", "all_reduce")]
    assert found == [(kind, unit) for unit in ("layers.1", "layers.0", "") for kind in ("reduce_scatter", "all_reduce")]


@on_ranks(4)
def test_without_all_reduce(rank: int, world_size: int) -> None:
    """Behaviour 107: partial shards add up unseen, `.grad` stays None; the next all-reduce takes the sum."""
    plain = Layers(2)
    model = in_units(plain, mesh=mesh_2d(2, 2))

    def three(m: Any, r: int) -> None:
        for micro in range(3):
            with events.record() as log:
                if m is model:
                    model.set_requires_all_reduce(micro == 2)
                backward(m, micro, r)
            if m is model:
                expected = {"reduce_scatter": 3, "all_reduce": 3 if micro == 2 else 0}
                assert count(log, "reduce_scatter", "all_reduce") == expected
                assert all((param.grad is None) == (micro < 2) for param in model.parameters())

    check(model, plain, rank, world_size, three, times=2)


@on_ranks(4)
def test_all_three_homes_of_a_gradient(rank: int, world_size: int) -> None:
    """Behaviour 95, 103, 107: unsynced, partial and sharded gradients add up; `zero_grad` takes those that show."""
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2))
    add(model, 100)
    add(model, 20, all_reduce=False)
    add(model, 3, sync=False)
    assert grads(model) == [100]
    with pytest.warns(UserWarning, match="were not reduced"):
        model.zero_grad()
    assert grads(model) == [None]
    add(model, 4, all_reduce=False)  # the partial is now 20 + 3 + 4
    assert grads(model) == [None]
    add(model, 1000)
    assert grads(model) == [1027]
    add(model, 1)
    assert grads(model) == [1028]


@on_ranks(2, 4)
@pytest.mark.parametrize("shards", [False, True])
def test_an_axis_of_one_rank(rank: int, world_size: int, shards: bool) -> None:
    """Behaviour 109: mesh (W, 1) is data parallelism by all-reduce alone; (1, W) gathers and reduces as FSDP does."""
    plain = Layers(2)
    mesh = mesh_2d(1, world_size) if shards else mesh_2d(world_size, 1)
    model = in_units(plain, mesh=mesh, reshard_after_forward=True)
    assert model.layers[0].weight.placements == (Replicate(), Shard(0))
    assert model.layers[0].weight.to_local().shape == (4 // world_size if shards else 4, 4)
    with events.record() as log:
        check(model, plain, rank, world_size, lambda m, r: backward(m, 0, r))
    found = count(log, "all_gather", "reduce_scatter")
    assert found == ({"all_gather": 6, "reduce_scatter": 3} if shards else {"all_gather": 0, "reduce_scatter": 0})
    assert shards or count(log, "all_reduce") == {"all_reduce": 3}


@on_ranks(4)
def test_members_of_a_group_at_different_times(rank: int, world_size: int) -> None:
    """Behaviour 111: parameters first used, or last used, in different microbatches share one partial sum."""
    model: Any = fully_shard(Dot(4), mesh=mesh_2d(2, 2))
    add(model, 1, None, None, None, all_reduce=False)
    add(model, 2, 30, None, None, all_reduce=False)
    with events.record() as log:
        add(model, None, 4, 500, None)
    assert grads(model) == [3, 34, 500, None]
    assert count(log, "all_reduce") == {"all_reduce": 1}
    add(model, 1, None, None, 7)
    assert grads(model) == [4, 34, 500, 7]


@on_ranks(4)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_partials_are_in_the_reduce_dtype(rank: int, world_size: int, reduce_dtype: torch.dtype) -> None:
    """Behaviour 107, 111: 256 and 1 are 257 in fp32 and 256 in bf16; the all-reduce has that dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2), mp_policy=policy)
    add(model, 256, all_reduce=False)
    with events.record() as log:
        add(model, 1)
    assert grads(model) == [257 if reduce_dtype is torch.float32 else 256]
    assert model.weights[0].grad.dtype == torch.float32
    assert [e.dtype for e in log if e.kind == "all_reduce"] == [reduce_dtype]


@on_ranks(4)
@pytest.mark.parametrize(
    ("factors", "force", "expected"),
    [
        ([8, 16, 4], [False, False, False], 6 * 4 / 8 + 2 * 4 / 16 + 3 * 4 / 4),
        ([16, 8], [True, False], 6 * 4 / 16 + 2 * 4 / 8),
        ([None, 16], [False, True], 6 * 4 / 4 + 2 * 4 / 16),
    ],
)
def test_divide_factor_of_each_microbatch(
    rank: int, world_size: int, factors: list[float | None], force: list[bool], expected: float
) -> None:
    """What was reduce-scattered is divided by the factor of its microbatch; all were by the last, silently."""
    model: Any = fully_shard(Dot(), mesh=mesh_2d(2, 2))
    for index, (value, factor, sums) in enumerate(zip((6, 2, 3), factors, force, strict=False)):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(sums)
        model.set_requires_all_reduce(index == len(factors) - 1)
        model(value).backward()
    assert grads(model) == [expected]


SETTERS = {
    "sync": lambda model, value: model.set_requires_gradient_sync(value),
    "all_reduce": lambda model, value: model.set_requires_all_reduce(value),
}


@on_ranks(4)
def test_order_of_the_setters(rank: int, world_size: int) -> None:
    """Behaviour 108: every sequence of the two setters does what it does on torch, where `set_requires_gradient_sync`
    sets both. transformers' Trainer relies on that; here gradients stayed partial for ever, without an error."""
    calls = [(name, value) for name in SETTERS for value in (False, True)]
    for sequence in product(calls, repeat=2):
        found = []
        for api in (fsdp2, torch.distributed.fsdp):
            model: Any = api.fully_shard(Dot(), mesh=mesh_2d(2, 2))
            for name, value in sequence:
                SETTERS[name](model, value)
            model(3).backward()
            model.set_requires_gradient_sync(True)
            model(4).backward()
            found.append(grads(model))
            for name, value in sequence:
                SETTERS[name](model, value)
                model(5).backward()
            found.append(grads(model))
        assert found[:2] == found[2:], sequence


# --- replicas that start from different parameters --------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("where", ["one_shard", "everywhere"])
def test_a_seed_for_each_rank(rank: int, world_size: int, where: str) -> None:
    """Behaviour 110: a program without torch.manual_seed trained as many models as replicas, each with a falling loss.
    Also where the difference is in one shard: ranks that hold equal shards get the error too, and nobody hangs."""
    torch.manual_seed(rank if where == "everywhere" else 0)
    model: Any = in_units(Layers(2), mesh=mesh_2d(2, 2))
    if where == "one_shard" and rank == 3:
        local(model.layers[1].weight.detach())[0, 0] += 1
    with pytest.raises(ArgumentError, match="replicas start from different parameters") as caught:
        model(batch(0, rank, 4))
    text = str(caught.value)
    if where == "one_shard":
        assert "'layers.1.weight' of rank 1 differs on rank 3." in text, text
        assert text.count("differs on") == 1
    else:
        assert "'layers.0.weight' of rank 0 differs on rank 2; 'layers.1.weight' of rank 0" in text, text
        assert "'layers.0.weight' of rank 1 differs on rank 3" in text, text
    for param in model.parameters():
        group = mesh_2d(2, 2).get_group("replicate")
        dist.broadcast(local(param.detach()), rank % 2, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its shards are of two seeds
        model(batch(0, rank, 4)).sum().backward()  # the same model, once its replicas are equal


@on_ranks(2, 4)
@pytest.mark.parametrize("zero", [0, 1])
def test_without_a_shard_axis(rank: int, world_size: int, zero: int) -> None:
    """ZeRO stage 0 compares replicas; at stage 1 ranks that sharded another model than the first one warn."""
    torch.manual_seed(rank)
    model = in_units(Layers(2), zero=ZeroPolicy(stage=zero))
    if zero == 0:
        with pytest.raises(
            ArgumentError, match=rf"'layers.0.weight' of rank 0 differs on rank{'s 1, 2, 3' * (world_size > 2)}"
        ):
            model(batch(0, rank, 4))
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(0, rank, 4))
        texts: list[Any] = [None] * world_size
        dist.all_gather_object(texts, [str(each.message) for each in caught])
        expected = r"has sharded other values than rank [0-9] \(of 'layers.0.weight'\)"
        assert len(re.findall(expected, str(texts))) == world_size - 1


@on_ranks(2)
def test_a_scalar_beside_shards(rank: int, world_size: int) -> None:
    """Scalars are replicated, also under FSDP: a model that is another on each rank is often found by these."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    model.temperature = nn.Parameter(torch.tensor(float(rank)))
    with pytest.raises(ArgumentError, match="'temperature' of rank 0 differs on rank 1"):
        fully_shard(model)(batch(0, rank, 4))


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
def test_every_bit_counts(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Any dtype, shards of a few bytes, frozen parameters: one element that differs is found, and NaN equals NaN."""
    model: Any = nn.Linear(3, 5)
    trainable = dtype.is_floating_point or dtype.is_complex
    values = torch.full((7,), float("nan")) if dtype.is_floating_point else torch.arange(7)
    model.more = nn.Parameter(values.to(dtype), requires_grad=trainable)
    fully_shard(model, mesh=mesh_2d(2, 2))
    twin = copy.deepcopy(model)
    model(batch(0, rank, 3))
    if rank == 0:
        local(twin.more.detach())[3] = 100
    with pytest.raises(ArgumentError, match="'more' of rank 0 differs on rank 2"):
        twin(batch(0, rank, 3))
