"""Consumers and ranks that die or are slow, in processes of their own: an error that names the rank, not a hang."""

import os
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


@pytest.mark.parametrize("to", ["all", "first"])
@pytest.mark.parametrize("what", ["killed", "slow"])
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
