"""Where the sum of gradients is divided: the table of Behaviour 125-131, and that every row gives the right mean."""

import itertools
from typing import Any

import pytest
import torch

from fsdp2.comm.scaling import Scaling, fp16_factors, scaling_for

NONE, BOTH = (False, False), (True, True)  # what can average: the reduce-scatter, the all-reduce


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1, (1, 1)), (2, (2, 1)), (3, (2, 1.5)), (4, (2, 2)), (6, (4, 1.5)), (8, (4, 2)), (16, (4, 4)), (64, (8, 8))],
)
def test_fp16_factors(factor: int, expected: tuple[float, float]) -> None:
    """Behaviour 126, 127: about half the factor before the sum, the rest after it."""
    assert fp16_factors(factor) == expected


TABLE = [  # a dtype, numbers of shards and of replicas, a factor, what can average; and what comes of it
    ((torch.float32, 4, 2, None, BOTH), Scaling(scatter_averages=True, all_reduce_averages=True)),
    ((torch.bfloat16, 4, 2, 4, BOTH), Scaling(scatter_averages=True)),
    ((torch.bfloat16, 4, 2, 3, BOTH), Scaling(post=3)),
    ((torch.float32, 4, 2, None, NONE), Scaling(post=8)),
    ((torch.float32, 4, 2, None, (True, False)), Scaling(scatter_averages=True, post=2)),
    ((torch.float16, 4, 2, None, NONE), Scaling(pre=4, post=2)),
    ((torch.float32, 1, 1, None, BOTH), Scaling()),
    ((torch.float16, 1, 1, 3, BOTH), Scaling(post=3)),
]


@pytest.mark.parametrize(("case", "expected"), TABLE)
def test_table(case: Any, expected: Scaling) -> None:
    """Behaviour 125, 128, 130, 131: the collectives' average, or a division of our own; none that was not asked for."""
    assert scaling_for(*case) == expected


def test_every_combination_divides_by_the_factor() -> None:
    """Behaviour 124, 129: the sum of equal gradients 1 over all ranks, scaled, is ranks / factor."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, shards, replicas, factor, averages in itertools.product(
        dtypes, (1, 2, 3, 8), (1, 2, 5), (None, 1, 2, 3, 8), (NONE, BOTH, (True, False), (False, True))
    ):
        scaling = scaling_for(dtype, shards, replicas, factor, averages)
        value = shards / scaling.pre
        value /= shards if scaling.scatter_averages else 1
        value *= replicas
        value /= replicas if scaling.all_reduce_averages else 1
        value /= scaling.post
        assert value == pytest.approx(shards * replicas / (factor or shards * replicas))
