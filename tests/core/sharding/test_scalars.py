"""Parameters without dims in a unit, which torch's FSDP2 refuses (Behaviour 184)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import fsdp2
from tests.helpers.parity_models import batch, full, local
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    Scaled,
)
from tests.helpers.trained_alike import SETTINGS, one_step, options, shard_children, train


class Scalar(nn.Module):
    """Nothing but a scalar: a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


def scaled() -> nn.Sequential:
    return nn.Sequential(Scaled(), Scalar(), Scaled())


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_scalars(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 184: replicated on every axis of the mesh; the gradient is the mean over all ranks."""
    given = options(setting, world_size)
    model = train(rank, world_size, scaled, lambda api, m: shard_children(api, m, **given))
    one_step(model, 0, rank)
    for scalar in (model[0].scale, model[1].value):
        assert isinstance(scalar, nn.Parameter) and isinstance(scalar, DTensor)
        for tensor in (scalar, scalar.grad):
            assert tensor.shape == local(tensor).shape == ()
            assert tensor.placements == (Replicate(),) * tensor.device_mesh.ndim
        assert scalar.device_mesh == model[0].linear.weight.device_mesh


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", ["reshard", "hsdp"])
def test_scalars_are_clipped_saved_and_loaded(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 184: `clip_grad_norm_`, `state_dict` and meta init treat them as any other parameter."""
    plain = scaled()
    given = options(setting, world_size)
    model = shard_children(fsdp2, copy.deepcopy(plain), **given)
    one_step(model, 0, rank)
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        plain_param.grad = full(param.grad).clone()  # that of a scalar is the local tensor itself
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(full(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    torch.testing.assert_close(full(model[0].scale.grad), plain[0].scale.grad)
    with torch.device("meta"):
        other = shard_children(fsdp2, scaled(), **given)
    other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert set(other[0].scale.placements) == {Replicate()}
    assert torch.equal(other(batch(1, rank)), model(batch(1, rank)))
