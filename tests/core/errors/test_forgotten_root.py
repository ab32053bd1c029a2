"""Trainable plain parameters beside sharded ones: named once, in the first backward, a clip or a save."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import fsdp2
from fsdp2 import checkpoint, fully_shard
from tests.helpers.parity_models import batch
from tests.helpers.ranks import on_ranks


class Lm(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False)
        return self.head(x)


def blocks_only(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return model


def backward(model: nn.Module, rank: int) -> None:
    model(batch(0, rank, 4)).square().sum().backward()


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings about parameters that are left out."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if "are not sharded, but others are" in str(each.message)]


NAMES = "3 trainable parameters ('embed.weight', 'embed.bias', 'head.weight') are not sharded, but others are"


@on_ranks(2, 4)
@pytest.mark.parametrize("first", ["backward", "clip", "save"])
def test_forgetting_the_root(rank: int, world_size: int, first: str, tmp_path: Path) -> None:
    """Embedding and head were not reduced, clipped and saved as they were: whatever comes first names them, once."""
    model = blocks_only(Lm())
    with warned() as texts:
        if first == "clip":  # backward in parts, such that no call of the model is running when the blocks first run
            hidden = model.blocks[1](model.blocks[0](model.embed(batch(0, rank, 4))))
            model.head(hidden).sum().backward()
            with torch.no_grad():
                model(batch(0, rank, 4))
        if first == "save":
            checkpoint.save(tmp_path / "saved", model=model)
        if first == "backward":
            for _ in range(2):
                backward(model, rank)
        assert fsdp2.clip_grad_norm_(model.parameters(), 1.0) >= 0
        checkpoint.save(tmp_path / "again", model=model)
    (text,) = texts
    assert NAMES in text
    assert text.startswith({"backward": "backward: ", "clip": "save: ", "save": "save: "}[first]), text


@on_ranks(2)
def test_parameters_that_came_later(rank: int, world_size: int) -> None:
    """Nobody reduces a head that is put in after `fully_shard`."""
    model: Any = fully_shard(blocks_only(Lm()))
    backward(model, rank)
    model.head = nn.Linear(8, 4, bias=False)
    with warned() as texts:
        backward(model, rank)
        fsdp2.clip_grad_norm_(list(model.parameters()), 1.0)
    (text,) = texts
    assert text.startswith("clip_grad_norm_: 1 trainable parameters ('head.weight')")


@on_ranks(2)
@pytest.mark.parametrize("case", ["ignored", "frozen", "ddp", "unused"])
def test_silence(rank: int, world_size: int, case: str, tmp_path: Path) -> None:
    """What is excluded on purpose, frozen, evaluated, reduced by DDP or never trained gives no warning."""
    model = run = blocks_only(Lm())
    if case == "ignored":
        fully_shard(model, ignored_params=set(model.head.parameters()))
    elif case == "frozen":
        with torch.no_grad():
            model(batch(0, rank, 4))
        model.embed.requires_grad_(False)
        model.head.requires_grad_(False)
    elif case == "ddp":
        model.embed = DistributedDataParallel(model.embed)
        model.head = DistributedDataParallel(model.head)
    else:
        run = nn.Module()
        run.model, run.critic = fully_shard(model), nn.Linear(2, 2)
        run.forward = lambda x: model(x)
    for _ in range(2):
        backward(run, rank)
        fsdp2.clip_grad_norm_(run.parameters(), 1.0)
    if case != "ddp":
        checkpoint.save(tmp_path / "saved", model=model)


@on_ranks(2)
def test_an_ignored_dtensor_can_be_moved(rank: int, world_size: int) -> None:
    """torch refuses to swap a tensor that a weak reference holds, which remembered `ignored_params`."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
    fully_shard(model, ignored_params={model[1].weight})
    model.to(torch.float64)
    assert all(param.dtype == torch.float64 for param in model.parameters())
