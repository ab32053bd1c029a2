"""`examples/explained.py`, an FSDP in 250 lines, trains bit by bit like the library."""

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from tests.helpers.examples import EXAMPLES
from tests.helpers.ranks import on_ranks


def explained() -> Any:
    spec = importlib.util.spec_from_file_location("explained", EXAMPLES / "explained.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model() -> tuple[nn.Module, list[nn.Module]]:
    """Rows that do not divide evenly, and fewer rows than ranks."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(9, 15), nn.GELU(), nn.Linear(15, 9)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 9), *blocks, nn.Linear(9, 1)), blocks


def train(model: nn.Module) -> list[torch.Tensor]:
    """Two backwards a step. Losses, and then the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(10):
        for _ in range(2):
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(torch.ones(1, 5)))
    return [*found, *(param.full_tensor().detach() for param in model.parameters())]


@on_ranks(1, 2)
def test_explained_is_the_library_bit_by_bit(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model, blocks = make_model()
    explained().Root(model, blocks, mesh)
    found = train(model)
    model, blocks = make_model()
    for block in blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    expected = train(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_it_keeps_no_whole_parameters(rank: int, world_size: int) -> None:
    model, blocks = make_model()
    root = explained().Root(model, blocks, init_device_mesh("cpu", (world_size,)))
    model(torch.randn(4, 5))
    assert [unit.storage.nbytes() > 0 for unit in root.units] == [False, False, False, True]
    model(torch.randn(4, 5)).sum().backward()
    assert not any(unit.storage.nbytes() for unit in root.units)


def test_it_is_short() -> None:
    assert len((EXAMPLES / "explained.py").read_text(encoding="utf-8").splitlines()) <= 250
