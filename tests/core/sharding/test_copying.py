"""`copy.deepcopy` of sharded modules, which torch's FSDP2 refuses (Behaviour 7), and the EMA that it is for."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, fully_shard
from tests.helpers.one_process import check
from tests.helpers.parity_models import Stack, TiedLm, batch, full, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    model(batch(number, rank)).square().mean().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["fresh", "after_forward", "after_step"])
@pytest.mark.parametrize("hsdp", [False, True])
def test_a_copy_is_a_model_of_its_own(rank: int, world_size: int, when: str, hsdp: bool) -> None:
    """Same values, other memory; it trains like one process, and the original does not notice."""
    plain = Stack()
    options: dict[str, Any] = {"mesh": mesh_2d(2, world_size // 2)} if hsdp else {}
    model = shard_blocks(fsdp2, copy.deepcopy(plain), **options)
    if when == "after_forward":
        model(batch(0, rank))
    elif when == "after_step":
        step(model, rank)
        model.zero_grad()
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and isinstance(copied.blocks[1], FSDPModule)
    assert fully_shard.state(copied) is not fully_shard.state(model)
    originals = {id(param) for param in model.parameters()}
    for (name, param), (other, new) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert name == other and isinstance(new, DTensor) and id(new) not in originals
        assert new.to_local().data_ptr() != param.to_local().data_ptr() or param.to_local().numel() == 0
        assert torch.equal(full(new), full(param)) and new.placements == param.placements
    check(copied, plain, rank, world_size, step)
    assert all(param.grad is None for param in model.parameters())
    check(model, plain, rank, world_size, step)


@on_ranks(2)
@pytest.mark.parametrize("borrows", [False, True])
def test_tied_weights_and_lists_stay_together(rank: int, world_size: int, borrows: bool) -> None:
    """As one unit; or as two, of which the copy of the second borrows from the copy of the first."""
    plain = TiedLm()
    model = copy.deepcopy(plain)
    for modules in (model.embed, model.head) if borrows else ([model.embed, model.head],):
        fully_shard(modules)
    shard_blocks(fsdp2, model)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight is not model.embed.weight
    assert (fully_shard.state(copied.head) is fully_shard.state(copied.embed)) is not borrows
    del model
    check(copied, plain, rank, world_size, step)
