"""Gradient accumulation: what is reduced when, where gradients wait, in which dtype (Behaviour 95-105)."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import Dot, add, grads
from tests.helpers.parity_models import (
    Layers,
    Stack,
    assert_gradients,
    batch,
    count,
    mean_gradients,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


def sharded_copy(plain: nn.Module, **options: Any) -> Any:
    return shard_blocks(fsdp2, copy.deepcopy(plain), **options)


def backward(model: nn.Module, step: int, rank: int, dim: int = 4) -> None:
    model(batch(step, rank, dim)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_without_sync(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 95: nothing is reduced, sharded grads stay None, parameters are resharded as ever."""
    plain = Layers(2)
    model = sharded_copy(plain, reshard_after_forward=raf)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        with events.record() as log:
            backward(model, step, rank)
        assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 0, "all_reduce": 0}
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.grad is None
    model.unshard()
    expected: dict[str, Tensor] = {}
    for step in range(2):
        backward(plain, step, rank)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_close(model.scale.grad, expected["scale"])  # this rank's own sum


@on_ranks(2, 4)
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_synced_and_unsynced(rank: int, world_size: int, seed: int) -> None:
    """Behaviour 96: any sequence of synced and unsynced backwards gives the sum; each synced one reduces each group
    once."""
    rng = random.Random(seed)
    plain = Stack(depth=2)
    model = sharded_copy(plain)
    for iteration in range(3):
        syncs = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))] + [True]
        for step, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            with events.record() as log:
                backward(model, step, rank, 8)
            assert count(log, "reduce_scatter") == {"reduce_scatter": 3 if sync else 0}

        def all_steps(m: nn.Module, r: int, steps: int = len(syncs)) -> None:
            for step in range(steps):
                backward(m, step, r, 8)

        assert_gradients(model, mean_gradients(plain, world_size, all_steps), rtol=1e-4, atol=1e-5)
        model.zero_grad(set_to_none=iteration % 2 == 0)


@on_ranks(2)
def test_sync_of_a_subset(rank: int, world_size: int) -> None:
    """Behaviour 98: groups without sync wait; the others reduce in every microbatch. `recurse=False` is this module
    only."""
    plain = Layers(3)
    model = sharded_copy(plain)
    model.layers[1].set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(False, recurse=False)
    with events.record() as log:
        backward(model, 0, rank)
    assert sorted(event.unit for event in log if event.kind == "reduce_scatter") == ["layers.0", "layers.2"]
    assert [layer.weight.grad is None for layer in model.layers] == [False, True, False]
    model.set_requires_gradient_sync(True)
    with events.record() as log:
        backward(model, 1, rank)
    assert count(log, "reduce_scatter") == {"reduce_scatter": 4}

    def both(m: nn.Module, r: int) -> None:
        backward(m, 0, r)
        backward(m, 1, r)

    assert_gradients(model, mean_gradients(plain, world_size, both))


@on_ranks(2, 4)
def test_keeping_parameters_after_backward(rank: int, world_size: int) -> None:
    """Behaviour 99: parameters kept after backward: plain, no gather in the next forward, grads after `reshard()`."""
    plain = Layers(2)
    model = sharded_copy(plain, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    backward(model, 0, rank)
    for param in model.parameters():
        assert not isinstance(param, DTensor)
        assert param.grad is None
    with events.record() as log:
        backward(model, 1, rank)
    assert count(log, "all_gather", "reshard") == {"all_gather": 0, "reshard": 0}
    for module in (model, *model.layers):
        module.reshard()

    def both(m: nn.Module, r: int) -> None:
        backward(m, 0, r)
        backward(m, 1, r)

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
    """Behaviour 101: they are `.grad` of the unsharded parameter, in the reduce dtype, one object; in-place edits
    count."""
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
    """Behaviour 102: a bf16 buffer loses the 1 of 256 + 1; the fp32 history on the sharded side never goes through
    bf16."""
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
    """Behaviour 103: `zero_grad` clears reduced gradients in either form of the parameters, and unreduced ones only
    while these are unsharded."""
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
