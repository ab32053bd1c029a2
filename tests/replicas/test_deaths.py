"""Ranks are killed, or stopped for a while. Survivors go on; what was committed is what one process has."""

import signal
from pathlib import Path

import pytest
import torch

import fsdp2
from tests.replicas.jobs import Config, Jobs, check_equal, kill_some, net, replay, whole

pytestmark = pytest.mark.timeout(900)


def check_ends(jobs: Jobs, first: int, second: int) -> list[dict[str, torch.Tensor]]:
    """Both replicas are bit-equal, and equal to a run in which the lost microbatches were left out."""
    ends = check_equal(jobs, first, second)
    replayed = replay(jobs, first)
    for name, param in whole(ends).items():
        assert torch.equal(param, replayed[-1][name]), name
    return replayed


@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_a_rank_is_killed(tmp_path: Path, address: str, rounds: int) -> None:
    with Jobs(tmp_path, Config(address)) as jobs:
        check_ends(jobs, *kill_some(jobs, rounds, seed=rounds))


@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_a_rank_is_killed_with_torchft(tmp_path: Path, rounds: int) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=300, quorum_tick_ms=20, heartbeat_timeout_ms=600
    )
    try:
        with Jobs(tmp_path, Config(lighthouse.address(), uses_torchft=True)) as jobs:
            check_ends(jobs, *kill_some(jobs, rounds, seed=rounds))
    finally:
        lighthouse.shutdown()


@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_the_writer_of_checkpoints_is_killed(tmp_path: Path, address: str, rounds: int) -> None:
    with Jobs(tmp_path, Config(address, saves_every=2)) as jobs:
        pair = kill_some(jobs, rounds, seed=rounds)
        ended = max(line["step"] for line in jobs.lines(pair[0]))
        jobs.wait(lambda: any(line.get("saved", 0) > ended for number in pair for line in jobs.lines(number)))
        replayed = check_ends(jobs, *pair)
        said = [line["saved"] for number in range(rounds + 2) for line in jobs.lines(number) if "saved" in line]
    assert len(set(said)) == len(said), "two replicas have written the same checkpoint"
    for step in said:  # also those of writers that were killed later
        model = net(1)
        fsdp2.checkpoint.load(tmp_path / "run" / f"step-{step:08}", model=model)
        assert all(torch.equal(param, replayed[step][name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("stopped", [[1], [0, 1]], ids=["rank", "replica"])
def test_one_stops_and_comes_back(tmp_path: Path, address: str, stopped: list[int], rounds: int) -> None:
    with Jobs(tmp_path, Config(address, timeout_s=1.5)) as jobs:
        pair = [jobs.start(), jobs.start()]
        for _ in range(rounds):
            jobs.together(*pair)
            pair.reverse()
            for rank in stopped:
                jobs.signal(pair[0], rank, signal.SIGSTOP)
            jobs.together(pair[1])
            for rank in stopped:
                jobs.signal(pair[0], rank, signal.SIGCONT)
            jobs.together(*pair)
        check_ends(jobs, pair[0], pair[1])
