"""Ignored parameters, and hooks on sharded ones (tests/behaviour.md, section K)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import events, fully_shard
from tests.helpers.models import check_step, linears, numels, reference_grads, run_step, sharded_copy
from tests.helpers.parity_models import assert_gradients, local, shard_like
from tests.helpers.ranks import on_ranks


def shard_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Every child is a unit, and then the root."""
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


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
def test_module_whose_parameters_are_all_ignored(rank: int, world_size: int) -> None:
    """Behaviour 93: a unit without parameters."""
    model = linears(2)
    fully_shard(model[0], ignored_params=set(model[0].parameters()))
    with events.record() as log:
        run_step(model[0], rank)
    assert not any(event.kind in ("all_gather", "reduce_scatter") for event in log)
    assert model[0].weight.grad is not None and not isinstance(model[0].weight, DTensor)


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
@pytest.mark.parametrize("raf", [True, False])
def test_post_accumulate_grad_hooks(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 94: on sharded parameters, once a backward, with the reduced gradient in place."""
    plain = linears(2)
    model = sharded_copy(plain, lambda m: shard_layers(m, reshard_after_forward=raf))
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(local(p.grad).clone()))
    for step in range(2):
        check_step(model, plain, rank, world_size, step)
        expected = reference_grads(plain, world_size, step)
        for name, param in model.named_parameters():
            assert len(seen[name]) == step + 1
            torch.testing.assert_close(seen[name][step], shard_like(expected[name], param))
            assert torch.equal(seen[name][step], local(param.grad))


@on_ranks(2)
def test_post_accumulate_grad_hooks_see_sums(rank: int, world_size: int) -> None:
    """Behaviour 94: with gradients already there, the hook sees the final value; without sync it does not fire."""
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
