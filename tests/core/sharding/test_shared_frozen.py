"""Shared, frozen and unused parameters (tests/behaviour.md, section K)."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import events, fully_shard
from tests.helpers.models import check_step, linears, numels, reference_grads, run_step, sharded_copy, units
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import assert_gradients, local, mean_gradients, shard_like
from tests.helpers.ranks import on_ranks

# --- shared -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_no_false_ties_when_built_layer_by_layer(rank: int, world_size: int) -> None:
    """Behaviour 87: freed parameters' ids are used again; that does not tie the layers."""
    model = nn.Sequential()
    for _ in range(20):
        model.append(fully_shard(nn.Linear(4, 4)))
        gc.collect()
    fully_shard(model)
    run_step(model, rank)
    assert all(param.grad is not None for param in model.parameters())


# --- frozen -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_bias_only_training(rank: int, world_size: int, when: str) -> None:
    """Behaviour 89: all parameters are gathered, biases reduced - as soon as their unit is through."""
    plain = linears(3)
    model = in_units(plain, reshard_after_forward=True) if when == "after" else None
    for each in (plain, model):
        for name, param in () if each is None else each.named_parameters():
            param.requires_grad_(name.endswith("bias"))
    model = model or in_units(plain, reshard_after_forward=True)
    with events.record() as log:
        check_step(model, plain, rank, world_size)
    assert sorted(numels(log, "all_gather")) == sorted([("0", 20), ("1", 20), ("2", 20)] * 2)
    assert sorted(numels(log, "reduce_scatter")) == [("0", 2), ("1", 2), ("2", 2)]
    found = [(event.kind, event.unit) for event in log]
    assert found.index(("reduce_scatter", "2")) < found.index(("pre_backward", "0")), "not delayed"


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_unit(rank: int, world_size: int, when: str) -> None:
    """Behaviour 90: gathered as usual, never reduced; unfreezing later brings its gradients."""
    plain = linears(3)
    plain[1].requires_grad_(when == "after")
    model = in_units(plain, reshard_after_forward=True)
    model[1].requires_grad_(False)
    with events.record() as log:
        run_step(model, rank)
    assert sorted(units(log, "all_gather")) == ["0", "0", "1", "1", "2", "2"]
    assert sorted(units(log, "reduce_scatter")) == ["0", "2"] and model[1].weight.grad is None
    for step in range(2):
        for each in (plain, model):
            each.requires_grad_(True)
        check_step(model, plain, rank, world_size, step)


# --- unused -----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Runs the branches that it is told to."""

    def __init__(self, *run: str) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.run = list(run)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        for name in self.run:
            x = self.get_submodule(name)(x)
        return x


@on_ranks(2)
def test_unused_parameters(rank: int, world_size: int) -> None:
    """Behaviour 91: no gradient, and no part in the reduction; with time the used ones change."""
    plain = Branches()
    model = sharded_copy(plain, fully_shard)
    for step, run in enumerate((["left"], ["right"], [], ["left", "frozen", "right"])):
        plain.run = model.run = run
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        used = 10 + 10 * ("left" in run) + 8 * ("right" in run)
        assert numels(log, "reduce_scatter") == [("", used)]


@on_ranks(2, 4)
def test_ranks_with_different_control_flow(rank: int, world_size: int) -> None:
    """Behaviour 92: parameters that a rank does not use count as zeros there; those that nobody used are zero."""
    plain = Branches()
    model = sharded_copy(plain, fully_shard)
    model.set_reduce_scatter_unused_params(True)
    model.run = ["left"] if rank % 2 else []
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "reduce_scatter")[0][1] == {2: 28, 4: 14}[world_size], "all but the frozen ones"

    def backward(module: nn.Module, which: int) -> None:
        module.run = ["left"] if which % 2 else []
        run_step(module, which)

    expected = mean_gradients(plain, world_size, backward)
    expected["right.weight"] = torch.zeros(4, 4)
    assert_gradients(model, expected)
    assert model.frozen.weight.grad is None


class OptionalScale(nn.Module):
    """Own parameters at the very end, of which one is optional; a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.run = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale
        return x + self.shift if self.run else x


@on_ranks(2)
def test_order_of_reductions_does_not_depend_on_the_rank(rank: int, world_size: int) -> None:
    """Behaviour 92: where one rank has all gradients of the root early and the other never."""
    plain = OptionalScale()
    model = in_units(plain)
    model.set_reduce_scatter_unused_params(True)

    def backward(module: nn.Module, which: int) -> None:
        module.run = which == 1
        run_step(module, which)

    with events.record() as log:
        backward(model, rank)
    assert units(log, "reduce_scatter") == ["", "layer"]
    assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2, 4)
def test_zeros_for_unused_parameters_were_sent_twice(rank: int, world_size: int) -> None:
    """At the end of a unit's backward and of the whole: a hang where one did not run."""
    model = in_units(nn.Sequential(Branches(), Branches()))
    model.set_reduce_scatter_unused_params(True)
    for unit in model:
        unit.run = ["left"] if rank % 2 else ["right"]
    with events.record() as log:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert sorted(units(log, "reduce_scatter")) == ["0", "1"]
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


# --- ignored ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ignored_parameters(rank: int, world_size: int) -> None:
    """Behaviour 93: the same objects, plain in the state dict, neither gathered nor reduced, but trained locally."""
    plain = linears(2)
    model = copy.deepcopy(plain)
    ignored = model[0].weight
    fully_shard(model, ignored_params={ignored})
    assert model[0].weight is ignored and isinstance(model[0].bias, DTensor)
    assert not isinstance(model.state_dict()["0.weight"], DTensor)
    assert isinstance(model.state_dict()["1.weight"], DTensor)
    with events.record() as log:
        run_step(model, rank)
    assert numels(log, "all_gather")[0] == ("", 24) and numels(log, "reduce_scatter") == [("", 12)]
    expected = reference_grads(plain, world_size)
    run_step(plain, rank)
    expected["0.weight"] = plain[0].weight.grad
    assert_gradients(model, expected)


@on_ranks(2)
def test_ddp_outside_fsdp_inside(rank: int, world_size: int) -> None:
    """Behaviour 93: DDP trains what FSDP ignores, and ignores what FSDP trains."""
    plain = linears(3)
    model = copy.deepcopy(plain)
    fully_shard(model[1])
    inner = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, inner)
    ddp = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        ddp.zero_grad()
        run_step(ddp, rank, step)
        assert_gradients(model, reference_grads(plain, world_size, step))


# --- hooks on parameters ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_post_accumulate_grad_hooks_see_sums(rank: int, world_size: int) -> None:
    """Behaviour 94: once a reduction, with the final value in place; without sync it does not fire."""
    plain = linears(1)
    model = sharded_copy(plain, fully_shard)
    seen: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(local(param.grad).clone()))
    run_step(model, rank, 0)
    model.set_requires_gradient_sync(False)
    run_step(model, rank, 1)
    assert len(seen) == 1
    model.set_requires_gradient_sync(True)
    run_step(model, rank, 2)
    assert len(seen) == 2
    total = sum(reference_grads(plain, world_size, step)["0.weight"] for step in range(3))
    torch.testing.assert_close(seen[1], shard_like(total, model[0].weight))


@on_ranks(2)
def test_user_hooks_ran_with_gradients_enabled(rank: int, world_size: int) -> None:
    """Autograd runs post-accumulate-grad hooks without recording; so must we, or an optimizer in backward fails."""
    model = fully_shard(nn.Linear(4, 4))

    def step(param: torch.Tensor) -> None:
        param.add_(param.grad, alpha=-0.1)
        param.grad = None

    before = model.weight.full_tensor().clone()
    model.weight.register_post_accumulate_grad_hook(step)
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.full_tensor(), before - 0.2)
