"""Consumers and ranks that die or are slow (an error that names the rank, not a hang), and the memory of buckets."""

import os
import resource
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from tests.helpers.mortal_ranks import Case, begin, run_cases
from tests.helpers.resident import address_space, extra_memory, reads_proc

RANKS, PATIENCE_S = 3, 1.0


def made() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def consume(rank: int, what: str, to: Any) -> float:
    """Rank 1 fails at its third bucket. Returns what the others would wait."""
    plan = fsdp2.weights(made(), patience_s=PATIENCE_S if what == "slow" else 60.0)
    dist.barrier()
    begin()
    who = 0 if to == "first" else 1
    held = plan.full(4096, to=to)
    for number, _ in enumerate(held):
        if rank == who and number == 2:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(7)  # "slow"
    return 0.0


@pytest.mark.parametrize(("what", "to"), [("killed", "all"), ("slow", "first")])
def test_a_rank_is_killed_or_its_consumer_is_slow(what: str, to: str) -> None:
    before = time.monotonic()
    (outcomes,) = run_cases([Case(consume, RANKS, (what, to), limit_s=40)])
    assert time.monotonic() - before < 35
    who = 0 if to == "first" else 1
    for rank, outcome in enumerate(outcomes):
        if rank == who:
            assert outcome.how == ("died" if what == "killed" else "raised")
        else:
            assert outcome.raised("CollectiveError"), outcome
            assert f"rank {who}" in outcome.text and "weights" in outcome.text, outcome.text


# --- memory -----------------------------------------------------------------------------------------------------------


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
