"""What `fsdp2.weights` takes: memory of a few buckets, and plans that are as cheap on 4,096 ranks as on 8."""

import resource
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.resident import address_space, extra_memory, reads_proc

MIB = 1 << 20
DIM = 1024  # a weight has 4 MiB


def publish(rank: int, lookahead: int, bucket: int, to: Any) -> None:
    """64 MiB of weights, of which one has 16 MiB."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(12)), nn.Linear(DIM, 4 * DIM, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def run() -> None:
        for _ in fsdp2.weights(model).full(bucket, lookahead, to):
            pass

    run()  # gloo's connections, and what is imported
    found = min(extra_memory(run) for _ in range(4))  # threads of gloo may let go of what has arrived late
    largest = 4 * 4 * MIB
    limit = (lookahead + 1) * bucket + largest + 4 * MIB
    assert found <= limit, f"{found / MIB:.1f} MiB, at most {limit / MIB:.1f} expected"
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + limit + 4 * MIB, before[1]))
    run()  # all of it would be "can't allocate memory"
    resource.setrlimit(resource.RLIMIT_AS, before)


@reads_proc
@pytest.mark.parametrize("to", ["all", "first"])
def test_memory_of_a_few_buckets(to: str) -> None:
    """Of 64 MiB that are published one or two buckets are in memory, and the largest tensor; on each rank."""
    cases = [Case(publish, 2, (1, 4 * MIB, to)), Case(publish, 3, (2, 8 * MIB, to))]
    for outcomes in run_cases(cases):
        for outcome in outcomes:
            assert outcome.ok, outcome


@torch.no_grad()
def test_only_the_parts_that_are_asked_for_are_cast() -> None:
    """A plan in 16 bits copies nothing until it is read, and `local` of a plan in the model's dtype is a view."""
    model = nn.Linear(4, 4)
    assert fsdp2.weights(model).local("weight").data_ptr() == model.weight.data_ptr()
