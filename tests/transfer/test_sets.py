"""`fsdp2.weight_sets`: other values in the same shards. And `fsdp2.asleep` on the CPU, where files are the place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import ArgumentError, OrderError, checkpoint, events, fully_shard
from fsdp2.disk import mapped
from tests.helpers.parity_models import batch
from tests.helpers.ranks import on_ranks


def made(kind: str, world_size: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    halves = (2, world_size // 2)
    mesh = init_device_mesh("cpu", halves, mesh_dim_names=("r", "s")) if kind == "hsdp" else None
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    model(batch(number, rank, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(values: Any) -> list[torch.Tensor]:
    named = values if isinstance(values, dict) else dict(values.named_parameters())
    return [each.full_tensor().detach().clone() if isinstance(each, DTensor) else each for each in named.values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_reference_policy(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    model, optimizer = made(kind, world_size)
    sets = fsdp2.weight_sets(model)
    first = whole(model)
    sets.save("ref")
    step(model, optimizer, 0, rank)
    trained, x = whole(model), batch(1, rank, 6)
    assert not equal(trained, first)
    with torch.no_grad():
        now = model(x)
        with events.record() as log, sets.use("ref"):
            pass
        assert not [event for event in log if event.group_size]
        with sets.use("ref"):
            assert equal(whole(model), first)
            then = model(x)
            assert not torch.equal(then, now)
            assert equal(whole(sets.state_dict("ref")), trained)  # they have changed places
            with pytest.raises(OrderError, match="in use"):
                sets.save("ref")
        assert torch.equal(model(x), now)
    assert equal(whole(model), trained)
    checkpoint.save(tmp_path / "both", model={**model.state_dict(), **sets.state_dict("ref", "ref.")})
    step(model, optimizer, 1, rank)
    with pytest.raises(ValueError), sets.use("ref"):
        raise ValueError
    assert not equal(whole(model), trained)
    assert equal(whole(sets.state_dict("ref")), first)
    sets.save("ref")
    checkpoint.load(tmp_path / "both", model={**model.state_dict(), **sets.state_dict("ref", "ref.")})
    assert equal(whole(model), trained) and equal(whole(sets.state_dict("ref")), first)
    sets.drop("ref")
    with pytest.raises(ArgumentError, match="there is no set 'ref'"):
        sets.state_dict("ref")


@on_ranks(2)
def test_an_average_and_adapters(rank: int, world_size: int) -> None:
    """What is trained within a set stays there."""
    model, optimizer = made("fsdp", world_size)
    sets = fsdp2.weight_sets(model)
    sets.save("average")
    expected = whole(model)
    for number in range(3):
        step(model, optimizer, number, rank)
        sets.save("average", decay=0.9)
        expected = [old.lerp(new, 1 - 0.9) for old, new in zip(expected, whole(model), strict=True)]
    assert all(
        torch.allclose(one, other) for one, other in zip(whole(sets.state_dict("average")), expected, strict=True)
    )
    sets.save("adapter", only=lambda name: name.startswith("1."))
    base = whole(model)
    with sets.use("adapter"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, rank)
        inside = whole(model)
    assert equal(whole(model)[2:], base[2:]) and not equal(whole(model)[:2], base[:2])
    assert equal(whole(sets.state_dict("adapter")), inside[2:])


@on_ranks(2, 4)
def test_asleep_in_files(rank: int, world_size: int, tmp_path: Path) -> None:
    """The next steps are the same bit for bit, and what would use what sleeps raises."""
    other, its_optimizer = made("fsdp", world_size)
    model, optimizer = made("fsdp", world_size)
    params = [*model.parameters()]
    for number in range(3):
        step(other, its_optimizer, number, rank)
        step(model, optimizer, number, rank)
        with fsdp2.asleep(model, optimizer, folder=str(tmp_path)):
            local = params[0].to_local()
            assert not local.numel() or mapped.file_of(local) is not None
            assert all(map(torch.equal, whole(model), whole(other)))
            checkpoint.save(tmp_path / f"step{number}", model=model, optimizer=optimizer)
            with pytest.raises(OrderError, match=r"is asleep: call fsdp2\.wake"):
                model(batch(0, rank, 6))
            model.reset_iter_state()
            with pytest.raises(OrderError, match="is asleep"):
                optimizer.step()
            with pytest.raises(OrderError, match="is asleep already"):
                fsdp2.sleep(model)
    assert [id(param) for param in model.parameters()] == list(map(id, params))
    step(other, its_optimizer, 3, rank)
    step(model, optimizer, 3, rank)
    assert equal(whole(model), whole(other))
    with pytest.raises(OrderError, match="is not asleep"):
        fsdp2.wake(model)
    model.set_requires_gradient_sync(False)
    model(batch(0, rank, 6)).sum().backward()
    with pytest.raises(OrderError, match="wait to be reduced"):
        fsdp2.sleep(model, folder=str(tmp_path))
    with pytest.raises(ArgumentError, match="'weigths'"):
        fsdp2.sleep(model, keep=["weigths"])


def test_a_model_that_is_not_sharded_does_not_sleep() -> None:
    with pytest.raises(ArgumentError, match="fully_shard was called"):
        fsdp2.sleep(nn.Linear(2, 2))
