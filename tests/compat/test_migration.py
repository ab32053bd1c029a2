"""What docs/migration.md says of FSDP1's strategies and wrap policies: the same training, collectives and units."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from fsdp2 import ZeroPolicy, auto_shard, by_class, by_predicate, by_size, events, transformer_blocks
from tests.helpers.migration_cases import DIM, run, shard, stack
from tests.helpers.parity_models import Stack, mesh_2d
from tests.helpers.ranks import on_ranks


def fsdp1(model: nn.Module, policy: Any, **options: Any) -> Any:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), **options
    )


def three_steps(model: nn.Module, rank: int) -> list[Any]:
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for index in range(3):
        losses.append(run(model, rank, index))
        optim.step()
        optim.zero_grad()
    return losses


def assert_same(rank: int, ours: nn.Module, **options: Any) -> None:
    """Losses of three steps, and how many collectives of each kind."""
    with events.record() as log:
        losses = three_steps(ours, rank)
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # torch's FSDP1 warns of itself
        expected = three_steps(fsdp1(stack(), torch_wrap.ModuleWrapPolicy({nn.Linear}), **options), rank)
    assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    counts = Counter(event.kind for event in log if event.group_size)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    theirs = dict.fromkeys(kinds, 0)
    for operation, times in mode.get_comm_counts().items():
        theirs[next(kind for kind in kinds if kind.replace("_", "") in str(operation).replace("_", ""))] += times
    assert {kind: counts[kind] for kind in kinds} == theirs


STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "FULL_SHARD": [{"reshard_after_forward": True}, {"zero": ZeroPolicy(3)}],
    "SHARD_GRAD_OP": [{"reshard_after_forward": False}, {"zero": ZeroPolicy(2)}],
    "NO_SHARD": [{"zero": ZeroPolicy(0)}],
}


@on_ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(rank: int, world_size: int, name: str) -> None:
    for options in STRATEGIES[name]:
        assert_same(rank, shard(**options), sharding_strategy=ShardingStrategy[name])


@on_ranks(4)
@pytest.mark.parametrize(("name", "stage"), [("HYBRID_SHARD", 3), ("_HYBRID_SHARD_ZERO2", 2)])
def test_hybrid_strategies(rank: int, world_size: int, name: str, stage: int) -> None:
    theirs = {"sharding_strategy": ShardingStrategy[name], "device_mesh": mesh_2d(2, 2)}
    assert_same(rank, shard(mesh=mesh_2d(2, 2), reshard_after_forward=stage == 3), **theirs)
    assert_same(rank, shard(zero=ZeroPolicy(stage, shard_size=2)), **theirs)


def our_units(policy: Any) -> list[str]:
    return [unit.fqn for unit in auto_shard(Stack(), policy, dry_run=True).units if unit.fqn]


def their_units(policy: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = dict(fsdp1(Stack(), policy).named_modules())
    wrapped = [name for name, module in names.items() if isinstance(module, FullyShardedDataParallel)]
    return [name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".") for name in wrapped[1:]]


@on_ranks(2)
def test_wrap_policies(rank: int, world_size: int) -> None:
    block = type(Stack().blocks[0])
    blocks = [f"blocks.{index}" for index in range(3)]
    assert their_units(torch_wrap.ModuleWrapPolicy({block})) == blocks
    same = by_predicate(lambda fqn, module: isinstance(module, block))
    for policy in (by_class(block), by_class("Block"), same, transformer_blocks()):
        assert sorted(our_units(policy)) == blocks

    def large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return torch_wrap.size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=2 * DIM * DIM)

    assert sorted(our_units(by_size(2 * DIM * DIM))) == sorted(their_units(large))
