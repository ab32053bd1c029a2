"""`fsdp2.Replicas` in one replica, and with what else a step may have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import fsdp2
from fsdp2 import ArgumentError, CollectiveError, OrderError, ReplicaManager, Replicas, UnsupportedError
from fsdp2.replicas.rounds import Round
from tests.helpers.ranks import on_ranks
from tests.replicas.jobs import Config, Jobs, check_equal, net, replay, whole


def sharded() -> tuple[Any, torch.optim.Optimizer]:
    model = net(0)
    for unit in (model[0], model[2], model):
        fsdp2.fully_shard(unit)
    return model, fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)


def manager_at(address: str) -> ReplicaManager:
    return ReplicaManager(address, patience=0.3, timeout=5.0)


@on_ranks(2)
def test_one_replica_trains_as_without(rank: int, world_size: int, address: str) -> None:
    plain, plain_optimizer = sharded()
    model, optimizer = sharded()
    manager = manager_at(address)
    replicas = Replicas(model, optimizer, manager)
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * world_size + rank))
        replicas.begin(weight=len(x))
        for each in (plain, model):
            each(x).square().mean().backward()
        assert replicas.commit() and replicas.saves and replicas.step == step + 1
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
    assert all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert manager.state_dict() == {"step": 3, "batches_committed": 3}
    manager.shutdown()


@on_ranks(2)
def test_a_step_that_was_left_is_not_committed(rank: int, world_size: int, address: str) -> None:
    model, optimizer = sharded()
    manager = manager_at(address)
    replicas = Replicas(model, optimizer, manager)
    with pytest.raises(OrderError, match="without begin"):
        replicas.commit()
    replicas.begin()
    assert not replicas.commit(), "there were no gradients"
    replicas.begin()
    model(torch.ones(1, 5)).sum().backward()  # and the loop goes on with the next batch
    optimizer.zero_grad()
    replicas.begin()
    model(torch.ones(1, 5)).sum().backward()
    assert replicas.commit() and replicas.step == 1
    replicas.begin()
    model(torch.ones(1, 5)).sum().backward()
    if rank == 1:
        manager.report_error(RuntimeError("of this rank alone"))
    assert not replicas.commit(), "on all ranks or on none"
    manager.shutdown()


@on_ranks(2)
def test_a_step_without_which_others_went_on_is_not_committed(rank: int, world_size: int, address: str) -> None:
    model, optimizer = sharded()
    manager = manager_at(address)
    replicas = Replicas(model, optimizer, manager)
    replicas.begin()
    model(torch.ones(1, 5)).sum().backward()
    store = manager._rounds.store
    before = store.get("round")
    dist.barrier()
    if rank == 0:
        store.set("round", json.dumps(Round(99)))
    assert not replicas.commit()
    if rank == 0:
        store.set("round", before)
    replicas.begin()
    model(torch.ones(1, 5)).sum().backward()
    assert replicas.commit() and replicas.step == 1
    manager.shutdown()


@on_ranks(2)
def test_what_cannot_work_is_an_error(rank: int, world_size: int, address: str) -> None:
    manager = manager_at(address)
    model, optimizer = sharded()
    with pytest.raises(ArgumentError, match="expected a module in which fully_shard"):
        Replicas(nn.Linear(2, 2), optimizer, manager)
    matrices = fsdp2.matrix_optimizer(torch.optim.Muon, [model[0].weight])
    with pytest.raises(UnsupportedError, match="cannot give its state"):
        Replicas(model, matrices, manager)
    model.set_all_reduce_hook(lambda flat: None)
    with pytest.raises(ArgumentError, match="has an all-reduce hook already"):
        Replicas(model, optimizer, manager)
    model, optimizer = sharded()
    fsdp2.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="step_in_backward"):
        Replicas(model, optimizer, manager)
    model = net(0)
    fsdp2.fully_shard(model, ignored_params={model[0].weight})
    with pytest.raises(UnsupportedError, match=r"'0\.weight' is trainable and not sharded"):
        Replicas(model, torch.optim.SGD(model.parameters()), manager)
    manager.shutdown()
    with pytest.raises(ArgumentError, match="expected host:port of a store"):
        ReplicaManager("here")
    with pytest.raises(CollectiveError, match=r"no store answers at 127\.0\.0\.1:1"):
        ReplicaManager("127.0.0.1:1", timeout=1.0)


@pytest.mark.parametrize("variant", ["rich", "join", "hsdp", "bf16"])
def test_features(tmp_path: Path, address: str, variant: str) -> None:
    """rich: microbatches, weights, clipping, torch's own AdamW; join: so too, but more microbatches on one rank; bf16:
    parameters, and gradients on the wire."""
    with Jobs(tmp_path, Config(address, variant=variant)) as jobs:
        pair = [jobs.start(), jobs.start()]
        jobs.together(*pair)
        third = jobs.start()
        jobs.together(*pair, third)
        jobs.kill(pair[0])
        jobs.together(pair[1], third)
        ends = check_equal(jobs, pair[1], third)
        if variant != "bf16":
            assert_close(whole(ends), replay(jobs, third)[-1], rtol=1e-4, atol=1e-5)


def test_a_replica_with_another_model_is_refused(tmp_path: Path, address: str) -> None:
    with Jobs(tmp_path, Config(address)) as jobs:
        first = jobs.start()
        jobs.together(first)
        jobs.config = Config(jobs.config.meets_at, variant="wide")
        jobs.start()
        jobs.wait(
            lambda: (
                "MismatchError: replicas: the others at this store have 4 parameters"
                in (tmp_path / "1.0.err").read_text()
            )
        )
        jobs.together(first)
