"""Neighbours in memory are stepped and clipped as one tensor: fewer calls, and not one bit changes.

The reference is the same model with torch's optimizer on the DTensors.
"""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2._torch import local_tensor
from fsdp2.optim import LocalOptimizer, clip_grad_norm_, local_optimizer
from fsdp2.runtime.unit import unit_of
from tests.helpers.optimizers import CASES, NOT_ON_DTENSORS, assert_same
from tests.helpers.parity_models import Block, Stack, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks

Optim = torch.optim.Optimizer
EVEN, UNEVEN = 12, 11


def sharded(hidden: int = EVEN, depth: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard_blocks(fsdp2, Stack(hidden=hidden, depth=depth), **options)


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 8)).square().sum().backward()


def train(
    model: nn.Module, optimizer: Optim, rank: int, steps: range, before: Callable[[int], object] = lambda step: None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, rank)
        before(step)
        optimizer.step()


def num_stepped(optimizer: Optim) -> int:
    """How many tensors the torch optimizer saw in the last step."""
    assert isinstance(optimizer, LocalOptimizer) and optimizer.flats is not None
    return len(optimizer.flats.flats)


Pair = list[tuple[Any, Optim]]


def pair(kind: type[Optim], hidden: int = EVEN, **options: Any) -> Pair:
    """Two equal models: one with a local optimizer, one with torch's."""
    models = [sharded(hidden) for _ in range(2)]
    makes: list[Any] = [partial(local_optimizer, kind), kind]
    options = {"lr": 1e-2, **options}
    return [(each, make(each.parameters(), **options)) for each, make in zip(models, makes, strict=True)]


def train_both(both: Pair, rank: int, steps: range, before: Callable[[Any, int], object] = lambda *_: None) -> None:
    """Train, and compare."""
    for model, optimizer in both:
        train(model, optimizer, rank, steps, partial(before, model))
    assert_same(both[0][1], both[1][1])


def assert_close(ours: Optim, theirs: Optim) -> None:
    """But for torch's fused kernels on the CPU, which round what fills no vector of the processor otherwise."""
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for one, two in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(local(one.detach()), local(two.detach()), rtol=1e-6, atol=1e-7)
            for key, value in ours.state[one].items():
                torch.testing.assert_close(local(value), local(theirs.state[two][key]), rtol=1e-5, atol=1e-8)


@on_ranks(2)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_ON_DTENSORS])
def test_bit_for_bit(rank: int, world_size: int, case: str, hidden: int) -> None:
    """Units are (inp, out) and two blocks of five parameters each: 14 in all. Even shards: a tensor for each unit."""
    kind, options = CASES[case]
    (ours, our_optimizer), (theirs, their_optimizer) = pair(kind, hidden, **options)
    train(ours, our_optimizer, rank, range(3))
    train(theirs, their_optimizer, rank, range(3))
    is_same = assert_close if options.get("fused") else assert_same
    is_same(our_optimizer, their_optimizer)
    # The output layer has three rows: 2 on one rank, 1 and padding on the other.
    assert num_stepped(our_optimizer) <= (5 if hidden == EVEN else 13)
    # From one to the other and back, in the middle of training.
    state = copy.deepcopy(our_optimizer.state_dict())
    our_optimizer.load_state_dict(copy.deepcopy(their_optimizer.state_dict()))
    their_optimizer.load_state_dict(state)
    train(ours, our_optimizer, rank, range(3, 5))
    train(theirs, their_optimizer, rank, range(3, 5))
    is_same(our_optimizer, their_optimizer)


@on_ranks(2)
def test_parameters_without_gradients(rank: int, world_size: int) -> None:
    """One in the middle of a run has none, its counter stays behind; one set by hand is no neighbour of others."""
    both = pair(torch.optim.AdamW)

    def change(model: Any, step: int) -> None:
        if step in (0, 2, 3):
            model.blocks[0].down.weight.grad = None
        if step == 3:
            model.blocks[1].norm.bias.grad = None
        if step == 1:
            model.blocks[0].up.weight.grad = model.blocks[0].up.weight.grad * 2
        if step == 4:
            backward(model, 7, rank)

    for steps in (range(1), range(1, 3), range(3, 6)):
        train_both(both, rank, steps, change)
    ours, our_optimizer = both[0]
    assert our_optimizer.state[ours.blocks[0].down.weight]["step"] == 3


@on_ranks(2)
@pytest.mark.parametrize("how", ["fill", "data", "numpy"])
def test_counters_are_of_each_parameter(rank: int, world_size: int, how: str) -> None:
    """No two parameters share a counter, also for torch's optimizer; and one that is changed from outside counts."""
    both = pair(torch.optim.AdamW, foreach=True)
    train_both(both, rank, range(2))
    (ours, our_optimizer), theirs = both
    plain = torch.optim.AdamW(ours.parameters(), lr=1e-2, foreach=True)
    plain.state.update(our_optimizer.state)
    train_both([(ours, plain), theirs], rank, range(2, 3))
    train_both(both, rank, range(3, 4))  # which finds counters at 3 that it left at 2
    for model, optimizer in both:
        counter = optimizer.state[model.blocks[0].up.bias]["step"]
        if how == "numpy":
            counter.numpy()[...] = 100.0
        else:
            (counter.data if how == "data" else counter).fill_(100.0)
    train_both(both, rank, range(4, 6))
    assert our_optimizer.state[ours.blocks[0].up.bias]["step"] == 102


@on_ranks(2)
def test_state_changed_in_place_and_replaced(rank: int, world_size: int) -> None:
    both = pair(torch.optim.AdamW)
    for step in range(4):
        train_both(both, rank, range(step, step + 1))
        for model, optimizer in both:
            state = optimizer.state[model.blocks[1].up.weight]
            local(state["exp_avg"]).mul_(0.5)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            if step == 2:
                del optimizer.state[model.blocks[0].norm.weight]
    assert_same(both[0][1], both[1][1])


@on_ranks(2)
@pytest.mark.parametrize("holds", ["the state", "a parameter's", "nothing"])
def test_state_is_replaced_through_what_was_kept(rank: int, world_size: int, holds: str) -> None:
    """By who asked the optimizer since the last step, or has kept a dict of it from long ago."""
    made = pair(torch.optim.SGD, momentum=0.9)
    for model, optimizer in made:
        train(model, optimizer, rank, range(1))
        whole: Any = optimizer.state if holds == "the state" else None
        param = next(iter(model.parameters()))
        own = optimizer.state[param] if holds == "a parameter's" else None
        train(model, optimizer, rank, range(1, 4))
        if whole is not None:
            own = whole[param]
        elif own is None:
            own = optimizer.state[param]
        del whole
        own["momentum_buffer"] = own["momentum_buffer"] * 0
        del own
        train(model, optimizer, rank, range(4, 7))
    assert_same(made[0][1], made[1][1])


@on_ranks(2)
def test_parameters_that_move(rank: int, world_size: int) -> None:
    """`to` gives all parameters new memory, an assignment gives it to one; the optimizer follows."""
    both = pair(torch.optim.SGD)
    train_both(both, rank, range(2))
    for model, _ in both:
        model.to(torch.float64).to(torch.float32)
    train_both(both, rank, range(2, 3))
    for model, _ in both:
        param = model.blocks[0].up.weight
        moved = DTensor.from_local(local(param.detach()) + 1, param.device_mesh, param.placements, run_check=False)
        torch.utils.swap_tensors(param, nn.Parameter(moved))
        other = local_tensor(model.blocks[1].up.weight)
        other.data = other.data + 1
    train_both(both, rank, range(3, 4))
    assert num_stepped(both[0][1]) <= 7


@on_ranks(2)
def test_gradients_that_change_between_clips(rank: int, world_size: int) -> None:
    """What a clip found out about gradients does not outlive them: one is replaced, one missing, one has other data."""
    model = sharded()
    up, down = (model.blocks[0].up.weight, model.blocks[0].down.weight)
    for step in range(7):
        model.zero_grad()
        backward(model, step, rank)
        if step == 2:
            up.grad = up.grad * 2
        if step == 4:
            down.grad = None
        if step == 6:
            moved = local_tensor(model.blocks[0].norm.bias.grad)
            moved.data = moved * 3
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        expected = nn.utils.get_total_norm(grads).full_tensor()
        before = [local(grad).clone() for grad in grads]
        norm = clip_grad_norm_(model.parameters(), 0.5 * expected.item())
        torch.testing.assert_close(norm, expected)
        for grad, value in zip(grads, before, strict=True):
            torch.testing.assert_close(local(grad), 0.5 * value)


class Steps(torch.optim.SGD):
    """Counts the tensors that it steps."""

    seen = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        Steps.seen = sum(param.grad is not None for group in self.param_groups for param in group["params"])
        return super().step(closure)


@on_ranks(2)
def test_kinds_that_the_user_vouches_for(rank: int, world_size: int) -> None:
    """A kind that we do not know may treat a tensor as a whole (blocks of 8-bit state): it sees each parameter."""
    model = sharded()
    optimizer = local_optimizer(Steps, model.parameters(), lr=0.1, elementwise=True)
    train(model, optimizer, rank, range(1))
    assert Steps.seen == 14


@on_ranks(4)
def test_neighbours_that_are_placed_differently(rank: int, world_size: int) -> None:
    """With tensor parallelism a weight is strided and its bias may be replicated: an assertion failed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    optimizers = []
    for make in (torch.optim.AdamW, partial(local_optimizer, torch.optim.AdamW)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fsdp2.fully_shard(model, mesh=mesh["dp"])
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch(step, rank // 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same(*optimizers)


# --- shards that stand together in one block of memory ----------------------------------------------------------------


def litter(seed: int) -> list[Tensor]:
    """Allocations of other sizes with each seed, so that what comes next stands elsewhere."""
    numbers = random.Random(seed)
    return [torch.empty(numbers.randrange(1, 5000)) for _ in range(numbers.randrange(200))]


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
