"""Saves to an S3-compatible server that is slow and fails: with the real client, s3fs, in real processes."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint
from fsdp2.checkpoint.io import planned_files
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.remote import RemoteStorage
from tests.helpers.mortal_ranks import Case, Outcome, run_cases

pytest.importorskip("s3fs")

from tests.helpers.s3_server import S3Server, use

RUN = "s3a://bucket/runs/a"
FOLDER = "bucket/runs/a/step-00000001"
RANKS = 2


def weights(rank: int, megabytes: list[float]) -> dict[str, Any]:
    """So much of each rank, and so much more of the first; the same in each process."""
    mesh = init_device_mesh("cpu", (RANKS,))
    each, more = (round(number * 250) for number in megabytes)
    torch.manual_seed(rank)
    local = torch.randn(1 - rank, more * 1000)
    return {
        "w": DTensor.from_local(torch.randn(each, 1000), mesh, [Shard(0)]),
        "of the first": DTensor.from_local(
            local, mesh, [Shard(0)], shape=torch.Size((1, more * 1000)), stride=(more * 1000, 1)
        ),
    }


def saves(rank: int, url: str, megabytes: list[float], part_bytes: int, dies_after: int, timeout_s: float) -> None:
    """Save, and check what is there; the last rank dies after some of its uploads."""
    use(url)
    planned_files.PART_BYTES = part_bytes
    if dies_after and rank == RANKS - 1:
        RemoteStorage.upload = dying(RemoteStorage.upload, dies_after)  # type: ignore[method-assign]
    model = weights(rank, megabytes)
    checkpoint.save(RUN, model=model, extra={"rank": rank}, step=1, timeout_s=timeout_s)
    dist.barrier()  # the last rank deletes what nobody needs after it has said that the save is complete
    newest = checkpoint.latest(RUN)
    assert newest == f"{RUN}/step-00000001"
    found = {name: torch.zeros_like(values) for name, values in model.items()}
    assert checkpoint.load(newest, model=found).extra == {"rank": rank}
    assert all(torch.equal(found[name].to_local(), model[name].to_local()) for name in model)
    names = RemoteStorage(RUN).names(newest)
    assert {*names} == {*checkpoint.describe(newest).files, MANIFEST}


def dying(upload: Any, uploads: int) -> Any:
    done: list[str] = []

    def counted(storage: RemoteStorage, path: str, *rest: Any) -> None:
        upload(storage, path, *rest)
        done.append(path)
        if len(done) == uploads:
            os.kill(os.getpid(), signal.SIGKILL)

    return counted


def run(
    server: S3Server, megabytes: list[float], part_bytes: int, dies_after: int = 0, timeout_s: float = 60.0
) -> list[Outcome]:
    args = (server.url, megabytes, part_bytes, dies_after, timeout_s)
    return run_cases([Case(saves, RANKS, args, limit_s=150)])[0]


def files(server: S3Server) -> set[str]:
    """The keys of the ranks' files that are there."""
    return {key for key in server.objects if key.startswith(f"{FOLDER}/model-rank-")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bytes_per_s", "fail_every", "megabytes", "part_bytes", "dies_after"),
    [
        pytest.param(float("inf"), 7, [1, 0], 200_000, 3, id="fast"),
        pytest.param(5e6, 50, [6, 0], 1 << 20, 4, id="slow", marks=pytest.mark.exhaustive),
    ],
)
def test_a_restart_uploads_only_what_is_not_there(
    bytes_per_s: float, fail_every: int, megabytes: list[float], part_bytes: int, dies_after: int
) -> None:
    """And of what has failed, nothing else twice."""
    with S3Server(bytes_per_s, fail_every) as server:
        survivor, victim = run(server, megabytes, part_bytes, dies_after, timeout_s=5.0)
        assert victim.value == "SIGKILL" and survivor.raised("CheckpointError"), (survivor, victim)
        assert f"{FOLDER}/{MANIFEST}" not in server.objects
        there = files(server)
        nbytes = sum(len(server.objects[key]) for key in there)
        received, failed = server.received, server.failed
        assert len(there) >= dies_after + megabytes[0] * 1e6 / part_bytes  # all of the survivor's
        again = run(server, megabytes, part_bytes)
        assert all(one.ok for one in again), again
        assert server.failed > 1 and server.created[f"{FOLDER}/{MANIFEST}"] == 1
        sizes = [len(server.objects[key]) for key in files(server)]
        assert sum(sizes) > 2 * megabytes[0] * 1e6 and max(sizes) < part_bytes + 10_000
        rest = sum(map(len, server.objects.values())) - nbytes
        assert server.received - received < rest + (server.failed - failed) * (part_bytes + 10_000) + 100_000


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_waits_for_one_that_gets_on() -> None:
    """The last rank waits for the first one longer than its time-out, three times."""
    with S3Server(5e6, 50) as server:
        outcomes = run(server, [1, 30], 1 << 20, timeout_s=2.0)
        assert all(one.ok for one in outcomes), outcomes
