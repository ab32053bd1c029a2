"""`copy.deepcopy` of sharded modules, which torch's FSDP2 refuses (Behaviour 7), and the EMA that it is for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2
from fsdp2 import FSDPModule, fully_shard
from tests.helpers.parity_models import (
    Stack,
    TiedLm,
    assert_gradients,
    batch,
    full,
    mean_gradients,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


def forward_backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, dim=next(iter(model.children())).weight.shape[-1])).square().mean().backward()


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
        forward_backward(model, 0, rank)
        model.zero_grad()
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and isinstance(copied.blocks[1], FSDPModule)
    assert fully_shard.state(copied) is not fully_shard.state(model)
    originals = {id(param) for param in model.parameters()}
    for (name, param), (other, new) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert name == other and isinstance(new, DTensor) and id(new) not in originals
        assert new.to_local().data_ptr() != param.to_local().data_ptr() or param.to_local().numel() == 0
        assert torch.equal(full(new), full(param)) and new.placements == param.placements
    expected = mean_gradients(plain, world_size, lambda m, r: m(batch(3, r)).square().mean().backward())
    copied(batch(3, rank)).square().mean().backward()
    assert_gradients(copied, expected)
    assert all(param.grad is None for param in model.parameters())
    model(batch(3, rank)).square().mean().backward()
    assert_gradients(model, expected)


@on_ranks(2)
def test_tied_weights_and_lists_stay_together(rank: int, world_size: int) -> None:
    plain = TiedLm()
    model = copy.deepcopy(plain)
    fully_shard([model.embed, model.head])
    shard_blocks(fsdp2, model)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight is not model.embed.weight
    assert fully_shard.state(copied.head) is fully_shard.state(copied.embed)
    expected = mean_gradients(plain, world_size, lambda m, r: m(batch(0, r)).square().mean().backward())
    copied(batch(0, rank)).square().mean().backward()
    assert_gradients(copied, expected)


@on_ranks(2)
def test_a_weight_that_two_units_share(rank: int, world_size: int) -> None:
    """The copy of the second unit borrows from the copy of the first."""
    plain = TiedLm()
    model = copy.deepcopy(plain)
    for child in (model.embed, model.head, *model.blocks, model):
        fully_shard(child)
    copied = copy.deepcopy(model)
    del model
    expected = mean_gradients(plain, world_size, lambda m, r: m(batch(0, r)).square().mean().backward())
    copied(batch(0, rank)).square().mean().backward()
    assert_gradients(copied, expected)


@on_ranks(2)
def test_a_parent_a_part_and_hooks(rank: int, world_size: int) -> None:
    """A plain parent of sharded modules; one block of a sharded model; the user's hooks come along, in their order."""
    parent = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parent[1].requires_grad_(False)  # plain and trainable beside sharded ones would be a warning
    seen: list[str] = []
    parent[0].register_forward_pre_hook(lambda module, args: seen.append(type(module.weight).__name__))
    fully_shard(parent[0])
    parent[0].register_forward_hook(lambda module, args, output: seen.append(type(module.weight).__name__))
    copied = copy.deepcopy(parent)
    copied(torch.ones(2, 4)).sum().backward()
    assert seen == ["Parameter", "Parameter"], "the copy is a root of its own, and keeps its parameters after forward"
    assert copied[0].weight.grad is not None and parent[0].weight.grad is None
    model = shard_blocks(fsdp2, Stack())
    model(batch(0, rank)).sum().backward()
    block = copy.deepcopy(model.blocks[0])
    block(torch.ones(2, 8)).sum().backward()
    assert isinstance(block.state_dict()["up.weight"], DTensor)


@on_ranks(2, 4)
def test_ema(rank: int, world_size: int) -> None:
    """torch's AveragedModel over a sharded model gives what it gives over the plain one."""
    torch.manual_seed(0)
    plain = Stack()
    model = shard_blocks(fsdp2, copy.deepcopy(plain))
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (model, plain)]
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(4):
        expected = mean_gradients(
            plain, world_size, lambda m, r, step=step: m(batch(step, r)).square().mean().backward()
        )
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        model(batch(step, rank)).square().mean().backward()
        for optim, average, each in zip(optims, averages, (model, plain), strict=True):
            optim.step()
            optim.zero_grad()
            average.update_parameters(each)
    for (name, mine), theirs in zip(averages[0].named_parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs, msg=lambda text, name=name: f"{name}: {text}")
    x = batch(9, 0)
    with torch.no_grad():
        torch.testing.assert_close(averages[0](x), averages[1](x))
