"""By what the sum of gradients is divided, as seen in gradients; `tests/pure/test_scaling.py` has the table."""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.testing import assert_close

import fsdp2
from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import Dot, linears
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import Stack, batch, count, full, local, mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import TpLm, dp_tp, tokens, tp_shard

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def reduced(model: Any, value: float) -> float:
    """This rank's gradient is `value`; what the reduction makes of all ranks'."""
    model.zero_grad()
    model(value).backward()
    return local(model.weights[0].grad).flatten()[0].item()


def dot(mesh: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    return fully_shard(Dot(size=8), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_divisors(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 124-126, 128-130: the mean over all ranks, or the sum divided by a factor, in every reduce dtype."""
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    for dtype, sums in itertools.product(DTYPES, (False, True)):
        model = dot(mesh, dtype)
        model.set_force_sum_reduction_for_comms(sums)
        assert reduced(model, 2.0**rank) == sum(2.0**r for r in range(world_size)) / world_size
        for factor in (1, 2, 8, 0.5, float(world_size)):
            model.set_gradient_divide_factor(factor)
            assert reduced(model, 3.0) == 3 * world_size / factor
        model.set_reduce_scatter_divide_factor(1.0)
        assert reduced(model, 3.0) == 3 * world_size
        model.set_gradient_divide_factor(None)
        assert reduced(model, 3.0) == 3


@on_ranks(4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("force_sum", [False, True])
def test_fp16_neither_overflows_nor_underflows(rank: int, world_size: int, hsdp: bool, force_sum: bool) -> None:
    """Behaviour 126, 130: half the division before, half after: 4 x 30000 does not overflow, 2^-23 does not vanish."""
    model = dot(mesh_2d(2, 2) if hsdp else None, torch.float16)
    model.set_force_sum_reduction_for_comms(force_sum)
    assert reduced(model, 30000) == 30000
    assert reduced(model, 2.0**-23) == 2.0**-23


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_rank(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Behaviour 131: no communication; divided once, and only by a factor that was set. Tiny gradients survive."""
    model = dot(mesh_2d(2, 1)["shard"], dtype)
    with events.record() as log:
        assert reduced(model, 2.0**-24) == 2.0**-24
    assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 0, "all_reduce": 0}
    for factor, expected in ((1, 3.0), (2, 1.5), (0.5, 6.0)):
        model.set_gradient_divide_factor(factor)
        assert reduced(model, 3.0) == expected


@on_ranks(2)
def test_padding_of_an_uneven_direct_gradient_was_uninitialised(rank: int, world_size: int) -> None:
    """On the direct lane nothing ever wrote the padding, so an all-reduce hook that took a norm got garbage."""
    model = nn.Linear(1000, 301, bias=False)  # large enough for the direct lane, rows 151 and 150
    fully_shard(model)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    for _ in range(3):
        model(torch.randn(2, 1000)).sum().backward()
    for flat in seen:
        assert flat.numel() == 151 * 1000
        local = model.weight.grad.to_local().numel()
        assert flat[local:].abs().sum() == 0


class SharesMemory(nn.Module):
    """The gradient of `shift` is a view of the gradient that flows on to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift.view(-1) + x


@on_ranks(2)
def test_scaling_a_gradient_changed_another_one(rank: int, world_size: int) -> None:
    """fp16 gradients are divided before they are summed, which was done in place: the input's came out divided too."""
    model = SharesMemory().half()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    x = torch.ones(64, dtype=torch.float16, requires_grad=True)
    weight = torch.arange(64).half()
    (model(x * 1) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(model.shift.grad.full_tensor().view(-1), weight)


# --- the hook of the user between reduce-scatter and all-reduce -------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_all_reduce_hook(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 137: once per group, on the flat result, before any gradient is there; after the all-reduce of HSDP."""
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4, dtype=torch.float64), mesh=mesh, mp_policy=policy)
    seen: list[Tensor] = []

    def hook(flat: Tensor) -> None:
        assert model.weight.grad is None
        seen.append(flat.clone())
        flat.mul_(3)

    model.set_all_reduce_hook(hook)
    model(batch(0, rank, 4).double()).sum().backward()
    (flat,) = seen
    num_shards = world_size // 2 if hsdp else world_size
    assert flat.shape == ((16 + 4) // num_shards,) and flat.dtype == torch.float32
    mean = torch.stack([batch(0, each, 4).sum(0) for each in range(world_size)]).mean(0)
    assert_close(flat[: 16 // num_shards].view(-1, 4), mean.expand(4 // num_shards, 4))
    assert model.weight.grad.dtype == torch.float64
    assert_close(full(model.weight.grad), 3 * mean.expand(4, 4), check_dtype=False)
    assert_close(full(model.bias.grad), torch.full((4,), 9.0), check_dtype=False)
    model.set_all_reduce_hook(None)
    model(batch(0, rank, 4).double()).sum().backward()
    assert len(seen) == 1


@on_ranks(2, 4)
def test_stream_of_the_all_reduce_hook(rank: int, world_size: int) -> None:
    """Behaviour 137: a stream of its own on a 1-D mesh; with HSDP the hook belongs to the all-reduce's stream."""
    stream = torch.cpu.Stream()
    plain = linears(1)
    model: Any = fsdp2.fully_shard(copy.deepcopy(plain))
    seen: list[int] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()), stream=stream)
    check(model, plain, rank, world_size, times=2)
    assert seen == [20 // world_size] * 2
    model = fsdp2.fully_shard(linears(1), mesh=mesh_2d(2, world_size // 2))
    with pytest.raises(ValueError, match="stream"):
        model.set_all_reduce_hook(lambda flat: None, stream=stream)


@on_ranks(4)
def test_replicas_by_an_all_reduce_hook(rank: int, world_size: int) -> None:
    """Behaviour 138: kept apart from `fully_shard`; hidden values are 0 and 45, whose mean is a gradient of both."""
    mesh = mesh_2d(2, 2)
    replica, group = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    model: Any = nn.Sequential(nn.Linear(10, 40, bias=False), nn.Linear(40, 10, bias=False))
    for index, layer in enumerate(model):
        nn.init.constant_(layer.weight, replica * (1 + index))
        fsdp2.fully_shard(layer, mesh=mesh["shard"])
        layer.set_all_reduce_hook(lambda flat: dist.all_reduce(flat.div_(2), group=group))
    fsdp2.fully_shard(model, mesh=mesh["shard"])
    model(torch.arange(10.0)).sum().backward()
    assert_close(full(model[1].weight.grad), torch.full((10, 40), 22.5))
    assert_close(full(model[0].weight.grad), (10 * torch.arange(10.0)).expand(40, 10))


# --- loss scaling over shards -----------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_grad_scaler(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 172: an inf in one shard makes all ranks skip the step and back off; the step after is taken."""
    num_shards = world_size // 2 if hsdp else world_size
    model = in_units(Stack(depth=1), mesh=mesh_2d(2, num_shards) if hsdp else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    is_last = rank % num_shards == num_shards - 1  # the last shard, on every replica
    check_scaler(scaler, model, batch(0, rank), model.inp.weight if is_last else None)


def check_scaler(scaler: Any, model: Any, given: Tensor, poisoned: Any, unscales: bool = False) -> None:
    """A step with an inf in the gradient of `poisoned`, which is skipped, and one without."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_poisoned in (True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optim.zero_grad()
        scaler.scale(model(given).square().sum()).backward()
        if is_poisoned and poisoned is not None:
            local(poisoned.grad).fill_(float("inf"))
        if unscales:
            scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        changed = [not torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(changed) == (not is_poisoned)
        assert scaler.get_scale() == 2.0


class ScaleFirst(nn.Module):
    """As CLIP: a scalar, which every rank has whole, before all that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@on_ranks(2, 4)
@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled first", "step alone"])
def test_sharded_grad_scaler(rank: int, world_size: int, unscales: bool) -> None:
    """Behaviour 172: `GradScaler` asks no other ranks where the first gradient is a scalar's; this one does."""
    if world_size == 2:
        model: Any = fsdp2.fully_shard(ScaleFirst())
        poisoned, given = model.linear.weight, batch(0, rank, 4)
    else:
        model = tp_shard(fsdp2, TpLm(), dp_tp())
        poisoned, given = model.blocks[0].up.weight, tokens(0, rank // 2)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of one element that is taken for a scalar
        check_scaler(scaler, model, given, poisoned if rank == world_size - 1 else None, unscales)
