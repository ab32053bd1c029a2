"""What happens on accelerators only, seen on the CPU with simulated streams (see tests/core/memory/test_streams.py)."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.runtime.unit import unit_of
from tests.helpers.models import linears
from tests.helpers.ranks import on_ranks
from tests.instruments.races.detector import detecting


@on_ranks(2)
def test_compute_does_not_wait_for_a_partial_reduction_at_once(rank: int, world_size: int) -> None:
    """HSDP, a backward without all-reduce. Compute waited for each reduce-scatter as soon as it had been issued, so
    that only the last microbatch of a step overlapped with its communication. Now it waits when the next is issued."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    with detecting() as detector:
        streams = detector.streams
        model = linears(3)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_is_last_backward(False)
        model.set_requires_all_reduce(False)
        model(torch.randn(2, 4)).sum().backward()
        reduced = streams.clocks["reduce"]["reduce"]
        waited = streams.clocks["compute"].get("reduce", 0)
        assert 0 < waited < reduced
        model.set_is_last_backward(True)
        model.set_requires_all_reduce(True)
        model(torch.randn(2, 4)).sum().backward()
        assert streams.has_waited_for(streams.clocks["reduce"])
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("has_backward", [False, True])
def test_nothing_is_kept_after_a_forward(rank: int, world_size: int, has_backward: bool) -> None:
    """Two units' memory stayed until the next all-gather, which after an evaluation may be long; and before a backward,
    for as long as the loss was computed, which is where a step of a language model needs most."""
    with detecting():
        model: nn.Module = linears(3)
        for layer in model.children():
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model)
        with torch.set_grad_enabled(has_backward):
            model(torch.randn(2, 4))
    for layer in model.children():
        unit = unit_of(layer)
        assert unit is not None
        for param in unit.params:
            assert param.whole is not None and param.whole.untyped_storage().nbytes() == 0
