"""Options that do not go together are refused before anything runs, with an error that says why. (The fuzzer
draws many of the others together: tests/instruments/differential.)"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2 import ArgumentError, FSDPError, MixedPrecisionPolicy, ShardPlacementResult, UnsupportedError, ZeroPolicy
from fsdp2 import fully_shard as shard
from tests.helpers.collectives import Gathers, Scatters
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks

INT8 = MixedPrecisionPolicy(all_gather_dtype=torch.int8)
WIRE = MixedPrecisionPolicy(reduce_scatter_dtype=torch.bfloat16)


def norm_apart(param: nn.Parameter) -> ShardPlacementResult | None:
    """The parameters of the norm are on a mesh of their own."""
    return ShardPlacementResult(Shard(0), mesh_2d(2, 1)) if param.ndim == 1 else None


Mistake = Callable[[Any], object]
REFUSED: dict[str, tuple[type[FSDPError], Mistake]] = {
    "give only one": (ArgumentError, lambda m: shard(m, zero=ZeroPolicy(2), reshard_after_forward=True)),
    "shard_size makes the mesh": (ArgumentError, lambda m: shard(m, zero=ZeroPolicy(3, 2), mesh=mesh_2d(1, 2))),
    "need stage 3": (ArgumentError, lambda m: ZeroPolicy(2, secondary_shard_size=2)),
    "stage 0 shards nothing": (ArgumentError, lambda m: ZeroPolicy(0, shard_size=2)),
    "not both": (ArgumentError, lambda m: ZeroPolicy(3, secondary_shard_size=2, shard_replicas=True)),
    "shard_replicas": (UnsupportedError, lambda m: shard(m, zero=ZeroPolicy(3, 1, None, True), mp_policy=INT8)),
    "on one mesh": (
        ArgumentError,
        lambda m: shard(m, shard_placement_fn=norm_apart).set_custom_all_gather(Gathers()),
    ),
    "narrower": (
        ArgumentError,
        lambda m: MixedPrecisionPolicy(reduce_dtype=torch.float16, reduce_scatter_dtype=torch.bfloat16),
    ),
    "leave one out": (ArgumentError, lambda m: shard(m, mp_policy=WIRE).set_custom_reduce_scatter(Scatters())),
}


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    for text, (kind, mistake) in REFUSED.items():
        with pytest.raises(kind, match=text):
            mistake(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)))
