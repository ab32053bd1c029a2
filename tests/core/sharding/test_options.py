<<<<<<< HEAD
"""Every option against one process that trains the plain model, in sets of a few that go together. All sets hold every
pair at least once (a pairwise covering array): some hundred trainings in place of 1500.
"""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
=======
"""Options that do not go together are refused before anything runs, with an error that says why. (Those that do are
drawn together by the fuzzer, tests/instruments/differential.)"""

from collections.abc import Callable
from typing import Any
>>>>>>> 092e8103 (Draw the options that torch lacks in the fuzzer)

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

<<<<<<< HEAD
from tests.helpers.options import BY_NAME, REFUSED, SKIPPED
from tests.helpers.options_case import Case
from tests.helpers.ranks import RanksFailed, on_ranks, run_on_ranks

Names = tuple[str, ...]
SET_SIZE = 6
SEED = 0
NUM_BATCHES = {2: 8, 4: 4}  # by the number of ranks
NUM_PROTECTIVE = {2: 1, 4: 0}
SAMPLE_ON_4 = 30  # pairs that do not need four ranks
=======
from fsdp2 import ArgumentError, FSDPError, MixedPrecisionPolicy, ShardPlacementResult, UnsupportedError, ZeroPolicy
from fsdp2 import fully_shard as shard
from tests.helpers.collectives import Gathers, Scatters
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks

INT8 = MixedPrecisionPolicy(all_gather_dtype=torch.int8)
WIRE = MixedPrecisionPolicy(reduce_scatter_dtype=torch.bfloat16)
>>>>>>> 092e8103 (Draw the options that torch lacks in the fuzzer)


def norm_apart(param: nn.Parameter) -> ShardPlacementResult | None:
    """The parameters of the norm are on a mesh of their own."""
    return ShardPlacementResult(Shard(0), mesh_2d(2, 1)) if param.ndim == 1 else None


Mistake = Callable[[Any], object]
REFUSED: dict[str, tuple[type[FSDPError], Mistake]] = {
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
<<<<<<< HEAD
    """What does not go together is refused, with an error that says why, before anything runs."""
    for pair, refusal in REFUSED.items():
        names = sorted(pair)
        case = Case([BY_NAME[name] for name in names], rank, world_size)
        try:
            with pytest.raises(refusal.error, match=refusal.match):
                case.sharded()
        except BaseException as error:  # pytest's own for "did not raise" is no Exception
            raise AssertionError(f"{case.name}: expected {refusal}, got {error!r}") from error


@pytest.mark.parametrize(
    ("world_size", "batch"),
    [
        pytest.param(size, batch, marks=[pytest.mark.exhaustive] if batch >= NUM_PROTECTIVE[size] else [])
        for size, number in NUM_BATCHES.items()
        for batch in range(number)
    ],
)
def test_together(world_size: int, batch: int) -> None:
    """They train as one process does."""
    check(world_size, covering(world_size)[batch :: NUM_BATCHES[world_size]])
=======
    for text, (kind, mistake) in REFUSED.items():
        with pytest.raises(kind, match=text):
            mistake(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)))
>>>>>>> 092e8103 (Draw the options that torch lacks in the fuzzer)
