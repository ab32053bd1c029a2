"""All-gathers in int8 (`all_gather_dtype`): with secondary shards, in inference, after conversions and in copies."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy, ZeroPolicy
from fsdp2.extras import int8
from fsdp2.extras.int8 import quantise
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import X, backward_of, sharded_layers, zero_shards

INT8 = MixedPrecisionPolicy(all_gather_dtype=torch.int8)


@on_ranks(2)
@pytest.mark.parametrize("original_lives", [True, False])
def test_a_copy_gathers_its_own_weights(rank: int, world_size: int, original_lives: bool) -> None:
    """`copying`: a copy is a model of its own. With `all_gather_dtype` it computes with the original's weights, or
    fails when that is gone (an EMA, a teacher)."""
    model = sharded_layers(mp_policy=INT8)
    backward_of(model)
    copied = copy.deepcopy(model)
    if original_lives:
        model.reshard()
        zero_shards(model)
    else:
        del model
    assert copied(X).abs().sum() > 0


@on_ranks(4)
def test_int8_with_a_secondary_shard(rank: int, world_size: int) -> None:
    """qwZ and hpZ are two halves of ZeRO++: together, backward failed."""
    model = sharded_layers(mp_policy=INT8, zero=ZeroPolicy(secondary_shard_size=2))
    backward_of(model)


@on_ranks(2)
def test_int8_after_a_first_forward_in_inference_mode(rank: int, world_size: int) -> None:
    """Plain parameters can do this: validate before the first step."""
    model = sharded_layers(mp_policy=INT8)
    with torch.inference_mode():
        model(X)
    backward_of(model)


@on_ranks(2)
def test_int8_follows_a_conversion(rank: int, world_size: int) -> None:
    """Behaviour 33, 35: a conversion between steps, with `all_gather_dtype`."""
    model = sharded_layers(mp_policy=INT8)
    backward_of(model)
    model.zero_grad()
    model.to(torch.bfloat16)
    backward_of(model, X.bfloat16())


@on_ranks(2)
def test_a_unit_is_quantised_in_one_call(rank: int, world_size: int) -> None:
    """There was one for each parameter, which on a device is a launch of ten kernels."""
    model, calls = sharded_layers(mp_policy=INT8), []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(int8, "quantise", lambda values: calls.append(values.shape) or quantise(values))
        model[0].unshard()
    assert len(calls) == 1 and len(list(model[0].parameters())) == 2
