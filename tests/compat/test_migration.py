"""What docs/migration.md says of FSDP1's strategies and wrap policies: the same losses, gradients, collectives and
units as theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp2 import (
    ZeroPolicy,
    by_class,
    by_predicate,
    by_size,
    transformer_blocks,
)
from tests.helpers.migration_cases import (
    DIM,
    Net,
    fsdp1,
    our_units,
    same,
    shard,
    their_units,
)
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks

STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "FULL_SHARD": [{"reshard_after_forward": True}, {"zero": ZeroPolicy(3)}],
    "SHARD_GRAD_OP": [{"reshard_after_forward": False}, {"zero": ZeroPolicy(2)}],
    "NO_SHARD": [{"zero": ZeroPolicy(0)}],
}


@on_ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(rank: int, world_size: int, name: str) -> None:
    for options in STRATEGIES[name]:
        same(rank, shard(**options), fsdp1(sharding_strategy=ShardingStrategy[name]))


@on_ranks(4)
@pytest.mark.parametrize(("name", "stage"), [("HYBRID_SHARD", 3), ("_HYBRID_SHARD_ZERO2", 2)])
def test_hybrid_strategies(rank: int, world_size: int, name: str, stage: int) -> None:
    for options in (
        {"mesh": mesh_2d(2, 2), "reshard_after_forward": stage == 3},
        {"zero": ZeroPolicy(stage, shard_size=2)},
    ):
        theirs = fsdp1(sharding_strategy=ShardingStrategy[name], device_mesh=mesh_2d(2, 2))
        same(rank, shard(**options), theirs)


@on_ranks(2)
def test_wrap_policies(rank: int, world_size: int) -> None:
    def is_block(fqn: str, module: nn.Module) -> bool:
        return isinstance(module, Net.Block)

    by_function = partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Net.Block))
    transformer = partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Net.Block})
    blocks = their_units(torch_wrap.ModuleWrapPolicy({Net.Block}))
    assert blocks == their_units(by_function) == their_units(transformer) == ["blocks.0", "blocks.1"]
    for policy in (by_class(Net.Block), by_class("Block"), by_predicate(is_block), transformer_blocks()):
        assert our_units(policy) == blocks
    large = partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=4 * DIM * DIM)
    assert our_units(by_size(4 * DIM * DIM)) == their_units(large)
