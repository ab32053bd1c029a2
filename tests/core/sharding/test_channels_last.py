"""Parameters whose memory is not contiguous, which torch's FSDP2 refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2
from tests.helpers.parity_models import batch, full
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    Convolutions,
)
from tests.helpers.trained_alike import SETTINGS, options, shard_children, train


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_channels_last(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 185: the DTensor and what forward sees have the strides that the parameter had."""
    given = options(setting, world_size)
    wanted = {name: param.stride() for name, param in Convolutions().named_parameters()}
    assert wanted["first.weight"] == (18, 1, 6, 2) and wanted["out.weight"] == (1, 7)
    model = train(rank, world_size, Convolutions, lambda api, m: shard_children(api, m, **given))
    inside: dict[str, tuple[int, ...]] = {}
    for prefix, child in model.named_children():
        child.register_forward_hook(
            lambda module, *_, prefix=prefix: inside.update(
                {f"{prefix}.{name}": param.stride() for name, param in module.named_parameters()}
            )
        )
    model(batch(0, rank))
    assert inside == wanted
    model.reshard()
    assert {name: param.stride() for name, param in model.named_parameters()} == wanted


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_channels_last_on_any_dim(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 28, 185: sharded over other dims, too, of which most do not divide by the number of ranks."""

    def shard(api: Any, model: nn.Module) -> None:
        shard_children(api, model, shard_placement_fn=lambda param: Shard(dim if param.ndim == 4 else 0))

    model = train(rank, world_size, Convolutions, shard)
    weight = model.second.weight
    assert weight.placements == (Shard(dim),) and weight.stride() == (54, 1, 18, 6)


@on_ranks(2, 4)
def test_channels_last_state_dict(rank: int, world_size: int) -> None:
    """Behaviour 185: values go out and in by position, whatever the strides of the other side."""
    plain = Convolutions()
    model = shard_children(fsdp2, copy.deepcopy(plain))
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name])
    other = shard_children(fsdp2, Convolutions())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(batch(0, rank)), plain(batch(0, rank)))
