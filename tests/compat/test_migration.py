"""What docs/migration.md says of FSDP1's strategies: the same training, and the same collectives."""

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

from fsdp2 import ZeroPolicy, events
from tests.helpers.migration_cases import run, shard, stack
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks


def fsdp1(**options: Any) -> Any:
    policy = torch_wrap.ModuleWrapPolicy({nn.Linear})
    options |= {"auto_wrap_policy": policy, "use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(stack(), **options)


def assert_same(rank: int, ours: nn.Module, **options: Any) -> None:
    """Losses before and after a step, and how many collectives of each kind a batch takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's FSDP1 warns of itself
        theirs = fsdp1(**options)
        with events.record() as log:
            losses = [run(ours, rank)]
        counts = [Counter(event.kind for event in log if event.group_size)]
        with CommDebugMode() as mode:
            expected = [run(theirs, rank)]
        counts.append(Counter(kind_of(each) for each, times in mode.get_comm_counts().items() for _ in range(times)))
        for model, found in ((ours, losses), (theirs, expected)):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            found.append(run(model, rank))
    assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert counts[0] == counts[1]


def kind_of(operation: Any) -> str:
    """By fsdp2's names."""
    name = str(operation).replace("_", "")
    return next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind.replace("_", "") in name)


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
