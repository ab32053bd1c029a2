"""`ZeroPolicy`: all policies train the same, at the costs that docs/parallel.md says."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from tests.helpers.models import linears
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Stack, assert_same, batch, full, mesh_2d
from tests.helpers.ranks import on_ranks


def run_step(model: nn.Module, step: int, rank: int) -> None:
    """Forward and backward of all microbatches, with the one call that tells the policy where a step ends."""
    for index in range(3):
        model.set_is_last_backward(index == 2)
        model(batch(100 * step + index, rank)).square().mean().backward()


def reference_step(model: nn.Module, step: int, world_size: int) -> None:
    for rank in range(world_size):
        for index in range(3):
            (model(batch(100 * step + index, rank)).square().mean() / world_size).backward()


# By half the number of ranks.
POLICIES: dict[str, Callable[[int], ZeroPolicy]] = {
    "stage 1": lambda half: ZeroPolicy(1),
    "stage 0": lambda half: ZeroPolicy(0),
    "stage 2": lambda half: ZeroPolicy(2),
    "stage 3": lambda half: ZeroPolicy(3),
    "stage 1 of replicas": lambda half: ZeroPolicy(1, shard_size=half),
    "sharded replicas": lambda half: ZeroPolicy(3, shard_size=half, shard_replicas=True),
    "stage 3 of replicas": lambda half: ZeroPolicy(3, shard_size=half),
    "secondary shards": lambda half: ZeroPolicy(3, secondary_shard_size=2),
}


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "mixed"), [*((name, False) for name in POLICIES), ("stage 2", True), ("sharded replicas", True)]
)
def test_training_equals_one_process(rank: int, world_size: int, name: str, mixed: bool) -> None:
    """Uneven rows, accumulation, Adam, an evaluation between steps; the sharded parameters say how they are sharded."""
    policy = POLICIES[name](world_size // 2)
    plain = Stack()
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    model = in_units(plain, zero=policy, **options)
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, plain)]
    for step in range(3):
        run_step(model, step, rank)
        reference_step(plain, step, world_size)
        if not mixed:
            for (where, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(f"step {step}: gradient of {where}", full(mine.grad), theirs.grad, False, 1e-4, 1e-6)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        x = batch(7, 0)
        with torch.no_grad():
            tolerance = {"rtol": 0.1, "atol": 0.1} if mixed else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(model(x).float(), plain(x), **tolerance)
    model.state_dict()  # where a policy keeps them, the evaluation has left parameters unsharded
    for (where, mine), theirs in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert where == theirs[0] and isinstance(mine, DTensor)
        limit = 5e-2 if mixed else 1e-4
        assert_same(where, full(mine), theirs[1], False, limit, limit)


@on_ranks(4)
def test_what_is_sharded(rank: int, world_size: int) -> None:
    """The placements, and the rows that a rank keeps; with sharded replicas, of all ranks."""

    def weight(policy: ZeroPolicy, **options: Any) -> DTensor:
        return fully_shard(nn.Linear(4, 8, bias=False), zero=policy, **options).weight

    assert weight(ZeroPolicy(0)).placements == (Replicate(),)
    assert weight(ZeroPolicy(0), mesh=mesh_2d(2, 2)).placements == (Replicate(), Replicate())
    for stage in (1, 2, 3):
        assert weight(ZeroPolicy(stage)).placements == (Shard(0),)
    hsdp = weight(ZeroPolicy(3, shard_size=2))
    assert hsdp.placements == (Replicate(), Shard(0)) and tuple(hsdp.to_local().shape) == (4, 4)
    over_all = weight(ZeroPolicy(3, shard_size=2, shard_replicas=True))
    assert tuple(over_all.to_local().shape) == (2, 4)
    original = torch.arange(32.0).view(8, 4)
    layer = nn.Linear(4, 8, bias=False)
    layer.weight = nn.Parameter(original.clone())
    sharded_layer = fully_shard(layer, zero=ZeroPolicy(3, shard_size=2, shard_replicas=True))
    first = 4 * (rank % 2) + 2 * (rank // 2)  # the replica's half, then this replica's half of that
    assert torch.equal(sharded_layer.weight.to_local(), original[first : first + 2])
    assert torch.equal(sharded_layer.weight.full_tensor(), original)


@on_ranks(2)
def test_stage_0_keeps_one_copy(rank: int, world_size: int) -> None:
    """As DDP: the parameter that computes is the one that the optimizer holds."""
    model = fully_shard(nn.Linear(4, 8), zero=ZeroPolicy(0))
    address = model.weight.to_local().data_ptr()
    model.unshard()
    assert model.weight.data_ptr() == address and not isinstance(model.weight, DTensor)


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    """Others are in `test_options.py`."""
    with pytest.raises(ArgumentError, match="ZeroPolicy"):
        ZeroPolicy(4)
    model = nn.Linear(2, 2)
    for policy, text in (
        (ZeroPolicy(3, shard_size=3), "divides"),
        (ZeroPolicy(3, secondary_shard_size=3), "divisor"),
        (ZeroPolicy(3, shard_replicas=True), "replicate axis"),
    ):
        with pytest.raises(ArgumentError, match=text):
            fully_shard(model, zero=policy)
    assert type(model) is nn.Linear and not isinstance(model, fsdp2.FSDPModule)


# --- what a policy costs: collectives in the table of docs/parallel.md ------------------------------------------------

DIM, LAYERS, MICROBATCHES = 8, 3, 5
EACH = LAYERS * MICROBATCHES
# The collectives of a step: how many over how many of the four ranks.
COSTS: list[tuple[ZeroPolicy, dict[tuple[str, int], int]]] = [
    (ZeroPolicy(0), {("all_reduce", 4): LAYERS}),
    (ZeroPolicy(1), {("all_gather", 4): LAYERS, ("reduce_scatter", 4): LAYERS}),
    (ZeroPolicy(2), {("all_gather", 4): LAYERS, ("reduce_scatter", 4): EACH}),
    (ZeroPolicy(3), {("all_gather", 4): 2 * EACH, ("reduce_scatter", 4): EACH}),
    (
        ZeroPolicy(2, shard_size=2),
        {("all_gather", 2): LAYERS, ("reduce_scatter", 2): EACH, ("all_reduce", 2): LAYERS},
    ),
    (
        ZeroPolicy(3, secondary_shard_size=2),
        {("all_gather", 4): EACH, ("all_gather", 2): EACH, ("reduce_scatter", 4): EACH},
    ),
    (
        ZeroPolicy(3, shard_size=2, shard_replicas=True),
        {("all_gather", 2): 2 * EACH + LAYERS, ("reduce_scatter", 2): EACH + LAYERS},
    ),
]


def layers(**options: Any) -> Any:
    return in_units(linears(LAYERS, DIM, bias=False), **options)


@on_ranks(4)
def test_costs_of_zero(rank: int, world_size: int) -> None:
    """The second step as the first."""
    for policy, expected in COSTS:
        model = layers(zero=policy)
        for _ in range(2):
            with events.record() as log:
                for index in range(MICROBATCHES):
                    model.set_is_last_backward(index == MICROBATCHES - 1)
                    model(batch(index, rank)).square().mean().backward()
            assert Counter((event.kind, event.group_size) for event in log if event.group_size) == expected, policy
            model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "params", "grads"), [(0, 1, 1), (1, 1, 1), (2, 1, 0), (3, 0, 0)])
def test_memory_of_zero(rank: int, world_size: int, stage: int, params: int, grads: int) -> None:
    """What is whole between the backwards of a step, and after its last, in parts of all parameters."""
    model = layers(zero=ZeroPolicy(stage))
    whole: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda module, args: whole.append(module.weight)) for layer in model]

    def held() -> tuple[float, float]:
        """Whole parameters, and gradients on them."""
        numel = LAYERS * DIM * DIM
        storage = sum(weight.untyped_storage().nbytes() // weight.itemsize for weight in whole)
        return storage / numel, sum(weight.grad.numel() for weight in whole if weight.grad is not None) / numel

    model.set_is_last_backward(False)
    model(batch(0, rank)).square().mean().backward()
    for hook in hooks:
        hook.remove()
    assert held() == (params, grads)
    model.set_is_last_backward(True)
    model(batch(1, rank)).square().mean().backward()
    assert held()[0] == (1 if stage == 0 else 0)
    numel = sum(param.to_local().numel() for param in model.parameters())
    assert numel * (1 if stage == 0 else 2) == LAYERS * DIM * DIM
    assert all(param.grad.to_local().shape == param.to_local().shape for param in model.parameters())
    if stage:
        assert held()[1] == 0
