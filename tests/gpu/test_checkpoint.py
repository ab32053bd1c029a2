"""Checkpoints of what is on a GPU: staged through pinned memory, complete whatever stream wrote the values."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
import fsdp2.checkpoint
from benchmarks.gpu import groups
from fsdp2.checkpoint.run import background

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def make_model(columns: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 255)).to(DEVICE)
    placement = (lambda param: Shard(param.ndim - 1)) if columns else None
    fsdp2.fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)), shard_placement_fn=placement)
    return model


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 256, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local().detach().clone() for param in model.parameters() if isinstance(param, DTensor)]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("background_save", [False, True])
def test_round_trip(tmp_path: Path, columns: bool, background_save: bool) -> None:
    """What is saved are the values when `save` was called, although training goes on at once and the device is late."""
    folder = str(tmp_path / "checkpoint")
    with groups.alone(DEVICE):
        model = make_model(columns)
        optimizer = trained(model)
        groups.occupy(0.2)  # what follows is enqueued behind this
        optimizer.zero_grad()
        model(torch.ones(4, 256, device=DEVICE)).sum().backward()
        optimizer.step()
        if background_save:
            handle = fsdp2.checkpoint.save(folder, model=model, optimizer=optimizer, async_op=True)
        else:
            fsdp2.checkpoint.save(folder, model=model, optimizer=optimizer)
        expected = values_of(model)
        trained(model)
        if background_save:
            handle.wait()
        other = make_model(columns)
        other_optimizer = trained(other, steps=1)
        fsdp2.checkpoint.load(folder, model=other, optimizer=other_optimizer)
        for left, right in zip(values_of(other), expected, strict=True):
            assert torch.equal(left, right)
        moments = [state["exp_avg"] for state in other_optimizer.state.values()]
        assert all(moment.device.type == DEVICE.type for moment in moments)


def test_staging_is_pinned(tmp_path: Path) -> None:
    with groups.alone(DEVICE):
        model = make_model()
        fsdp2.checkpoint.save(str(tmp_path / "one"), model=model, async_op=True).wait()
        arenas = [arena for device, arena in background._arena.items() if device.type == DEVICE.type]
        assert arenas and all(arena.is_pinned() for arena in arenas)


def test_steps_go_where_the_stored_options_want_them(tmp_path: Path) -> None:
    """`fused` comes back with the options: a step count that stayed on the CPU failed at the next step."""
    folder = str(tmp_path / "checkpoint")
    with groups.alone(DEVICE):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model(torch.ones(4, 256, device=DEVICE)).sum().backward()
        optimizer.step()
        fsdp2.checkpoint.save(folder, model=model, optimizer=optimizer)
        for steps in (0, 1):
            other = make_model()
            other_optimizer = trained(other, steps)
            fsdp2.checkpoint.load(folder, model=other, optimizer=other_optimizer)
            assert all(state["step"].device.type == DEVICE.type for state in other_optimizer.state.values())
            other_optimizer.step()


def test_load_into_gaps_on_another_stream(tmp_path: Path) -> None:
    """A target that is not contiguous is filled by a kernel, which nobody waited for."""
    folder = str(tmp_path / "checkpoint")
    with groups.alone(DEVICE):
        expected = torch.randn(3000, 2000)
        fsdp2.checkpoint.save(folder, model={"weight": expected})
        with torch.cuda.stream(torch.cuda.Stream()):
            target = torch.zeros(2000, 3000, dtype=torch.float64, device=DEVICE).t()
            fsdp2.checkpoint.load(folder, model={"weight": target}, cast=True)
            actual = target.clone()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(actual.cpu(), expected.double())


def test_load_on_another_stream(tmp_path: Path) -> None:
    """Threads that read know the default stream only."""
    folder = str(tmp_path / "checkpoint")
    with groups.alone(DEVICE):
        model = make_model(columns=True)
        fsdp2.checkpoint.save(folder, model=model)
        expected = values_of(model)
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            other = make_model(columns=True)
            for param in other.parameters():
                assert isinstance(param, DTensor)
                groups.occupy(0.05)
                param.to_local().detach().fill_(7.0)
            fsdp2.checkpoint.load(folder, model=other)
            actual = values_of(other)
        torch.cuda.current_stream().synchronize()
        for left, right in zip(actual, expected, strict=True):
            assert torch.equal(left, right)
