"""Who keeps what alive: modules own units, and nothing points back but weakly, so that `del model` frees memory at
once. One-rank worlds: ownership does not depend on the number of ranks."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from fsdp2 import fully_shard
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_del_model_frees_it_without_the_garbage_collector(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model(torch.randn(2, 4)).sum().backward()
    units = [weakref.ref(fully_shard.state(module)) for module in model.modules()]
    modules = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model, layer
        assert [ref() for ref in modules] == [None] * 3
        assert [ref() for ref in units] == [None] * 3
    finally:
        gc.enable()


@on_ranks(2)
def test_original_parameters_are_freed_as_they_are_sharded(rank: int, world_size: int) -> None:
    """Behaviour 188: the whole data is freed as soon as the shard is made."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    originals = [layer.weight.untyped_storage()._weak_ref() for layer in layers]
    fully_shard(layers)
    assert all(torch.UntypedStorage._expired(original) for original in originals)
    for original in originals:
        torch.UntypedStorage._free_weak_ref(original)
