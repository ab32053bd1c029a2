"""Gradient accumulation: what is reduced when, where gradients wait, in which dtype (Behaviour 95-105)."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import Dot, add, grads, is_unsharded
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Layers, assert_gradients, batch, count, mean_gradients
from tests.helpers.ranks import on_ranks


def backward(model: nn.Module, step: int, rank: int, dim: int = 4) -> None:
    model(batch(step, rank, dim)).square().sum().backward()


def both(model: nn.Module, rank: int) -> None:
    backward(model, 0, rank)
    backward(model, 1, rank)


@on_ranks(2)
def test_sync_of_a_subset(rank: int, world_size: int) -> None:
    """Behaviour 98: groups without sync wait; the others reduce in every microbatch. `recurse=False`: one unit only."""
    plain = Layers(3)
    model = in_units(plain)
    model.layers[1].set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(False, recurse=False)
    with events.record() as log:
        backward(model, 0, rank)
    assert sorted(event.unit for event in log if event.kind == "reduce_scatter") == ["layers.0", "layers.2"]
    assert [layer.weight.grad is None for layer in model.layers] == [False, True, False]
    model.set_requires_gradient_sync(True)
    backward(model, 1, rank)
    assert_gradients(model, mean_gradients(plain, world_size, both))


@on_ranks(2, 4)
def test_keeping_parameters_after_backward(rank: int, world_size: int) -> None:
    """Behaviour 99: parameters kept after backward: plain, no gather in the next forward, grads after `reshard()`."""
    plain = Layers(2)
    model = in_units(plain, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    backward(model, 0, rank)
    assert is_unsharded(model) and all(param.grad is None for param in model.parameters())
    with events.record() as log:
        backward(model, 1, rank)
    assert count(log, "all_gather", "reshard") == {"all_gather": 0, "reshard": 0}
    for module in (model, *model.layers):
        module.reshard()
    assert_gradients(model, mean_gradients(plain, world_size, both))


BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(2)
def test_accumulates_in_the_reduce_dtype(rank: int, world_size: int) -> None:
    """Behaviour 100: bf16 gradients 256 and 1, reduced in fp32, make 257, which bf16 cannot hold."""
    model = fully_shard(Dot(), mp_policy=BF16_FP32)
    add(model, 256, sync=False)
    add(model, 1)
    assert grads(model) == [257]
    model = fully_shard(Dot(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    add(model, 256, sync=False)
    add(model, 1)
    assert grads(model) == [256]


@on_ranks(2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32, MixedPrecisionPolicy(torch.bfloat16)])
def test_first_use_in_a_later_microbatch(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    """Behaviour 100, 103: fresh and accumulated gradients of one group go together, whatever their dtypes were."""
    model = fully_shard(Dot(3), mp_policy=policy)
    add(model, 1, None, None, sync=False)
    add(model, None, 2, None)
    assert grads(model) == [1, 2, None]
    add(model, 1, 1, 3)
    assert grads(model) == [2, 3, 3]


@on_ranks(2)
def test_unsynced_gradients_are_the_unsharded_parameters(rank: int, world_size: int) -> None:
    """Behaviour 95, 101: on the unsharded parameter, in the reduce dtype, one object; in-place edits count."""
    model: Any = fully_shard(Dot(), mp_policy=BF16_FP32)
    add(model, 256, sync=False)
    assert model.weights[0].grad is None
    model.unshard()
    weight = model.weights[0]
    first = weight.grad
    assert (weight.dtype, first.dtype, first.shape) == (torch.bfloat16, torch.float32, weight.shape)
    model.reshard()
    add(model, 1, sync=False)
    model.unshard()
    assert model.weights[0] is weight
    assert weight.grad is first
    assert (first == 257).all()
    first.sub_(200)
    model.reshard()
    add(model, 3)
    assert grads(model) == [60]
    model.unshard()
    assert weight.grad is None


@on_ranks(2)
def test_sharded_history_is_kept_apart(rank: int, world_size: int) -> None:
    """Behaviour 102: a bf16 buffer loses the 1 of 256 + 1; sharded fp32 gradients never go through it."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = fully_shard(Dot(), mp_policy=policy)
    add(model, 3)
    add(model, 256, sync=False)
    add(model, 1, sync=False)
    add(model, -256)
    assert grads(model) == [3]
    model = fully_shard(Dot(), mp_policy=policy)
    add(model, 256)
    add(model, 1, sync=False)
    add(model, -256)
    assert grads(model) == [1]


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_reduced_gradients(rank: int, world_size: int, set_to_none: bool) -> None:
    """Behaviour 103: reduced gradients in either form of the parameters, others only while these are unsharded."""
    model: Any = fully_shard(Dot())
    add(model, 5)
    add(model, 2, sync=False)
    with pytest.warns(UserWarning, match="were not reduced"):  # once a root
        model.zero_grad(set_to_none)  # sharded now: the 5 goes, the 2 stays
    add(model, 1)
    assert grads(model) == [3]
    add(model, 7, sync=False)
    model.unshard()
    model.zero_grad(set_to_none)  # unsharded now: both go
    model.reshard()
    add(model, 1)
    assert grads(model) == [1]


@on_ranks(2)
def test_divide_factor_applies_to_each_reduction(rank: int, world_size: int) -> None:
    """Behaviour 104: factor 3 on two ranks, gradients of 3: 6/3, then nothing, then (6 + 6)/3 more."""
    model: Any = fully_shard(Dot())
    model.set_gradient_divide_factor(3)
    add(model, 3)
    assert grads(model) == [2]
    add(model, 3, sync=False)
    assert grads(model) == [2]
    add(model, 3)
    assert grads(model) == [6]
