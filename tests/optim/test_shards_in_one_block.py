"""Shards that stand together in one block of memory (`carving.py`): each mended bug of them, told as a story."""

import random
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import fsdp2
from fsdp2.optim import clip_grad_norm_, local_optimizer
from fsdp2.runtime.unit import unit_of
from tests.helpers.parity_models import Block, Stack, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks

EVEN, UNEVEN = 12, 11


def litter(seed: int) -> list[Tensor]:
    """Allocations of other sizes with each seed, so that what comes next stands elsewhere."""
    numbers = random.Random(seed)
    return [torch.empty(numbers.randrange(1, 5000)) for _ in range(numbers.randrange(200))]


def sharded(hidden: int = EVEN, depth: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard_blocks(fsdp2, Stack(hidden=hidden, depth=depth), **options)


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 8)).square().sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_the_order_of_the_state(rank: int, world_size: int, hidden: int) -> None:
    """Runs were sorted by address, another on each rank: a whole state dict mixed up moments of one shape."""
    torch.manual_seed(0)
    junk = []
    blocks = []
    for index in range(8):
        junk.append(litter(10 * index + rank))
        del junk[:-2]
        blocks.append(fsdp2.fully_shard(Block(8, hidden)))
    model = fsdp2.fully_shard(nn.Sequential(*blocks, nn.Linear(8, 1)))
    optimizer = local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    backward(model, 0, rank)
    optimizer.step()
    assert list(optimizer.state) == list(model.parameters())
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, param in model.named_parameters():
        whole = optimizer.state[param]["exp_avg"].full_tensor()
        assert torch.equal(state[name]["exp_avg"], whole), name


@on_ranks(4)
def test_replicas_stay_equal_through_clipping(rank: int, world_size: int) -> None:
    """... and each replica added up its own, so that replicas drifted apart."""
    mesh = mesh_2d(2, 2)
    model = sharded(hidden=64, depth=6, mesh=mesh)
    optimizer = local_optimizer(torch.optim.SGD, model.parameters(), lr=1e-3)
    for step in range(6):
        junk = litter(10 * step + rank)
        optimizer.zero_grad()
        backward(model, step, rank)
        norm = clip_grad_norm_(model.parameters(), 1e-3)
        norms = [torch.empty(()) for _ in range(world_size)]
        torch.distributed.all_gather(norms, norm)
        assert len({each.item() for each in norms}) == 1
        optimizer.step()
        del junk


@on_ranks(2)
def test_shards_that_were_moved_to_shared_memory(rank: int, world_size: int) -> None:
    """`share_memory_` gives a storage other memory: the run stepped, and gathers copied, where the shards had been."""
    model = sharded()
    optimizer = local_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            for param in model.blocks.parameters():
                local(param.detach()).share_memory_()
        optimizer.zero_grad()
        backward(model, step, rank)
        before = [local(param.detach()).clone() for param in model.parameters()]
        optimizer.step()
        after = [local(param.detach()) for param in model.parameters()]
        assert not any(one.numel() and torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with torch.no_grad():
        for param in model.blocks.parameters():
            local(param).zero_()
        model.blocks[0].unshard()
        assert all(not param.any() for param in model.blocks[0].parameters())


@on_ranks(2)
def test_old_shards_are_freed(rank: int, world_size: int) -> None:
    """The gathers kept what they had worked out of the shards, and so the shards, until the next forward."""
    model = sharded()
    backward(model, 0, rank)
    old = [ref(local(param.detach()).untyped_storage()) for param in model.parameters()]
    model.zero_grad()
    model.to_empty(device="cpu")
    assert not any(weak() is not None for weak in old)


@on_ranks(2)
def test_assigned_tensors_stay_where_they_are(rank: int, world_size: int) -> None:
    """`load_state_dict(assign=True)` takes the very tensors, also where other models hold them."""
    model = sharded()
    given = {name: nn.Parameter(value.detach() + 1) for name, value in model.state_dict().items()}
    held = {name: local(value.detach()).data_ptr() for name, value in given.items() if name.startswith("blocks")}
    model.load_state_dict(given, assign=True)
    backward(model, 0, rank)
    assert {name: local(model.get_parameter(name).detach()).data_ptr() for name in held} == held


@on_ranks(2)
def test_ranks_that_froze_others(rank: int, world_size: int) -> None:
    """Trainable parameters came first, so that ranks which had frozen others gathered one into another."""
    torch.manual_seed(0)
    block = Block(8, 8)
    (block.up if rank else block.down).weight.requires_grad_(False)
    expected = block(batch(0, 0, 8))
    fsdp2.fully_shard(block)
    with torch.no_grad():
        torch.testing.assert_close(block(batch(0, 0, 8)), expected.detach())


@on_ranks(2)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_a_replaced_shard_is_copied_by_itself(rank: int, world_size: int, hidden: int) -> None:
    """One that was replaced does not lie where its neighbours are any more."""
    model = sharded(hidden)
    unit = unit_of(model.blocks[0])
    assert unit is not None
    unit.refresh()  # as before the first forward
    (group,) = unit.groups
    replaced = group.params[1]
    values = {param: (param.sharded.detach() + 1).full_tensor() for param in group.params}
    with torch.no_grad():
        for param in group.params:
            local(param.sharded).add_(1)
    other = nn.Parameter(replaced.sharded.detach().clone())
    model.blocks[0].load_state_dict({replaced.fqn: other}, assign=True, strict=False)
    assert replaced.sharded is other
    model.blocks[0].unshard()
    assert all(torch.equal(param.unsharded, values[param]) for param in group.params)


@on_ranks(2)
def test_autograd_notices_what_was_stepped(rank: int, world_size: int) -> None:
    """A step raised the version of parameters without gradients too, so that autograd believed them changed."""
    model = sharded()
    optimizer = local_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    backward(model, 0, rank)
    param, stepped = model.blocks[0].up.weight, model.blocks[0].down.weight
    param.grad = None
    losses = [each.to_local().square().sum() for each in (param, stepped)]
    optimizer.step()
    losses[0].backward()
    assert param.grad is not None
    with pytest.raises(RuntimeError, match="modified"):
        losses[1].backward()
