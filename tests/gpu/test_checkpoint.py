"""Checkpoints of what is on a GPU: pinned memory, step counts, gaps. That they hold the right step: test_nccl.py."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
import fsdp2.checkpoint
from benchmarks.gpu import groups
from fsdp2.checkpoint.run import background

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 255)).to(DEVICE)
    return fsdp2.fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)))


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 256, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


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
