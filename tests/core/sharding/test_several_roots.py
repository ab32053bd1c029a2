"""Several roots in one process, which share a weight or their reductions."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp2 import FSDPError, fully_shard, share_comm_ctx
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import X, assert_same_gradients, backward_of, sharded_layers, two_layers


@on_ranks(2)
def test_a_weight_of_two_roots(rank: int, world_size: int) -> None:
    """One weight in two models (actor and critic) has two backwards, and would be reduced in the first one's only:
    refused."""
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    second[0].weight = first[0].weight
    fully_shard(first)
    fully_shard(second)
    backward_of(first)
    with pytest.raises(FSDPError, match="outside of this root"):
        backward_of(second)


@on_ranks(2)
def test_a_trunk_of_two_roots(rank: int, world_size: int) -> None:
    """Two models share a trunk. The error said that the trunk had run first, which was not so."""
    trunk = fully_shard(nn.Linear(8, 8))
    first, second = (fully_shard(nn.Sequential(trunk, nn.Linear(8, 8))) for _ in range(2))
    backward_of(first)
    with pytest.raises(FSDPError, match="'0' belongs to another root already, this FSDPSequential"):
        backward_of(second)


@on_ranks(2)
def test_sharing_while_reductions_are_under_way(rank: int, world_size: int) -> None:
    """Behaviour 141: between two microbatches `share_comm_ctx` keeps what is in flight."""
    model, other = sharded_layers(), sharded_layers()
    model.set_is_last_backward(False)
    backward_of(model)
    share_comm_ctx([model, other])
    model.set_is_last_backward(True)
    backward_of(model)
    plain = two_layers()
    backward_of(plain)
    backward_of(plain)
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_a_root_outlives_anothers_handle(rank: int, world_size: int) -> None:
    """Two roots of different lifetimes share their reductions: the second one is not held up for ever."""
    model, other = sharded_layers(), sharded_layers()
    share_comm_ctx([model, other])
    model.set_manual_backward_finalization(True)
    backward_of(model)
    model.finalize_backward(async_op=True)
    del model
    other(X)
    other.reset_iter_state()
    other(X)
