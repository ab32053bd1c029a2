"""Neighbours in memory are stepped and clipped as one tensor: fewer calls, and not one bit changes.

The reference is the same model with torch's optimizer on the DTensors.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2._torch import local_tensor
from fsdp2.optim import LocalOptimizer, clip_grad_norm_, local_optimizer
from tests.helpers.optimizers import CASES, NOT_ON_DTENSORS, assert_same
from tests.helpers.parity_models import Stack, batch, local, shard_blocks
from tests.helpers.ranks import on_ranks

Optim = torch.optim.Optimizer
EVEN, UNEVEN = 12, 11


def sharded(hidden: int = EVEN, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard_blocks(fsdp2, Stack(hidden=hidden, depth=2), **options)


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
