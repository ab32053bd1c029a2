"""`ZeroPolicy`: all policies train the same. Collectives and bytes: `test_zero_costs.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from tests.helpers.parity_models import Stack, assert_same, batch, full, mesh_2d
from tests.helpers.ranks import on_ranks

MICROBATCHES = 3
DIM, LAYERS = 8, 3


def microbatch(step: int, index: int, rank: int) -> torch.Tensor:
    return batch(100 * step + index, rank, DIM)


def run_step(model: nn.Module, step: int, rank: int) -> None:
    """Forward and backward of all microbatches, with the one call that tells the policy where a step ends."""
    for index in range(MICROBATCHES):
        model.set_is_last_backward(index == MICROBATCHES - 1)
        model(microbatch(step, index, rank)).square().mean().backward()


def reference_step(model: nn.Module, step: int, world_size: int) -> None:
    for rank in range(world_size):
        for index in range(MICROBATCHES):
            (model(microbatch(step, index, rank)).square().mean() / world_size).backward()


def sharded(plain: nn.Module, policy: ZeroPolicy, **options: Any) -> nn.Module:
    model = copy.deepcopy(plain)
    for child in getattr(model, "layers", None) or model.blocks:
        fully_shard(child, zero=policy, **options)
    return fully_shard(model, zero=policy, **options)


STAGES = {f"stage {stage}": ZeroPolicy(stage) for stage in range(4)}
REPLICAS = {
    "stage 1": ZeroPolicy(1, shard_size=2),
    "stage 3": ZeroPolicy(3, shard_size=2),
    "secondary shards": ZeroPolicy(3, secondary_shard_size=2),
    "sharded replicas": ZeroPolicy(3, shard_size=2, shard_replicas=True),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("name", [*STAGES, *(f"{name} of replicas" for name in REPLICAS)])
@pytest.mark.parametrize("mixed", [False, True])
def test_training_equals_one_process(rank: int, world_size: int, name: str, mixed: bool) -> None:
    """Uneven rows, accumulation, Adam, an evaluation between steps; the sharded parameters say how they are sharded."""
    of_replicas = name.endswith(" of replicas")
    policy = REPLICAS[name.removesuffix(" of replicas")] if of_replicas else STAGES[name]
    if of_replicas and world_size == 2 and "secondary" not in name:
        policy = ZeroPolicy(policy.stage, 1, None, policy.shard_replicas)
    torch.manual_seed(0)
    plain = Stack()
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    model = sharded(plain, policy, **options)
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
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.reshard()  # where a policy keeps them, the evaluation has left parameters unsharded
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
def test_a_frozen_base_stays_gathered(rank: int, world_size: int) -> None:
    """LoRA: the base is gathered once, then never again, until something changes it."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(DIM, DIM)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    plain = nn.Sequential(Lora(), Lora())
    model = copy.deepcopy(plain)
    for child in model:
        fully_shard(child, zero=ZeroPolicy(3, keep_frozen=True))
    fully_shard(model, zero=ZeroPolicy(3, keep_frozen=True))

    def gathered(step: int) -> list[int]:
        for each in (model, plain):
            each.zero_grad()
        with events.record() as log:
            model(batch(step, rank)).square().mean().backward()
        for r in range(world_size):
            (plain(batch(step, r)).square().mean() / world_size).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            wanted = theirs.grad
            assert_same(name, None if mine.grad is None else full(mine.grad), wanted, False, 1e-4, 1e-6)
        return sorted(event.numel for event in log if event.kind == "all_gather")

    base, adapter = DIM * DIM + DIM, 4 * DIM
    assert gathered(0) == [adapter] * 4 + [base] * 2
    assert gathered(1) == [adapter] * 4
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with torch.no_grad():
        model[0].base.weight.mul_(0.5)  # autograd counts it, so the next unshard notices
        plain[0].base.weight.mul_(0.5)
    assert gathered(2) == [adapter] * 4 + [base]
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert gathered(3) == [adapter] * 4 + [base] * 2
    for each in (model, plain):
        each[1].base.requires_grad_(True)
    assert gathered(4) == [adapter] * 4 + [base], "what was kept serves one more forward"
    assert gathered(5) == [adapter] * 4 + [base] * 2, "what is trained is gathered for forward and for backward"


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    for bad in ({"stage": 4}, {"stage": 2, "secondary_shard_size": 2}, {"stage": 1, "shard_replicas": True}):
        with pytest.raises(ArgumentError, match="ZeroPolicy"):
            ZeroPolicy(**bad)
    model = nn.Linear(2, 2)
    cases: list[tuple[ZeroPolicy, dict[str, Any], str]] = [
        (ZeroPolicy(2), {"reshard_after_forward": True}, "only one"),
        (ZeroPolicy(3, shard_size=2), {"mesh": mesh_2d(1, 2)}, "shard_size makes the mesh"),
        (ZeroPolicy(3, shard_size=3), {}, "divides"),
        (ZeroPolicy(3, secondary_shard_size=3), {}, "divisor"),
        (ZeroPolicy(3, shard_replicas=True), {}, "replicate axis"),
    ]
    for policy, options, text in cases:
        with pytest.raises(ArgumentError, match=text):
            fully_shard(model, zero=policy, **options)
    assert type(model) is nn.Linear and not isinstance(model, fsdp2.FSDPModule)
