"""Both lanes give the same: the models of the other tests are small and so take the packed lane; here every parameter
that can takes the direct one, and then every one the packed lane of `FlatComm`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2.comm
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.comm.flat import FlatComm
from fsdp2.comm.gloo import GlooComm
from tests.helpers.ranks import on_ranks


@contextmanager
def lanes(which: str) -> Iterator[None]:
    """``direct``: whatever can; ``packed``: nothing is direct; ``flat``: the backend's own collectives."""
    with pytest.MonkeyPatch.context() as patch:
        if which == "flat":
            patch.setitem(fsdp2.comm.COMMS, "gloo", FlatComm())
        else:
            patch.setattr(GlooComm, "direct_min_bytes", 0 if which == "direct" else None)
        yield


def train(rank: int, which: str, hsdp: bool, policy: MixedPrecisionPolicy, world_size: int) -> list[torch.Tensor]:
    """Uneven, even and empty shards, frozen and trainable, accumulation and partial all-reduce."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 15), nn.Tanh(), nn.Linear(15, 3), nn.Tanh(), nn.Linear(3, 8))
    model[2].bias.requires_grad_(False)
    mesh = None
    if hsdp:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    with lanes(which):
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 != 0)
            model.set_requires_all_reduce(step % 3 != 1)
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).float().square().mean().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize("policy", [None, torch.bfloat16])
def test_direct_and_packed_are_bitwise_equal(
    rank: int, world_size: int, hsdp: bool, policy: torch.dtype | None
) -> None:
    """The same sums in the same order, whichever way the bytes went."""
    mixed = MixedPrecisionPolicy(policy, torch.float32)
    results = {which: train(rank, which, hsdp, mixed, world_size) for which in ("direct", "packed")}
    for left, right in zip(results["direct"], results["packed"], strict=True):
        assert torch.equal(left, right)


@on_ranks(2)
def test_large_parameters_take_the_direct_lane_by_default(rank: int, world_size: int) -> None:
    """And then no byte of them is packed: the group has one operand for each, and one for the rest."""
    model = fully_shard(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)))
    model.unshard()
    gather = fully_shard.state(model).groups[0].source.base.gather
    weights = [param.unsharded.data_ptr() for param in fully_shard.state(model).params if param.unsharded.ndim == 2]
    assert [operand.full.data_ptr() for operand in gather.operands[:2]] == weights
    assert len(gather.operands) == 3
