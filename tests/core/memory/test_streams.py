"""Memory on streams (docs/design.md, invariants 4 and 5), under the race detector on the CPU."""

import pytest
import torch
from torch import nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.comm.gloo import GlooComm
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import X, backward_of, sharded_layers
from tests.instruments.races.detector import detecting
from tests.instruments.races.models import make_model, train


@on_ranks(2)
@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_accelerator_order_is_safe_and_gives_the_same(
    rank: int, world_size: int, hsdp: bool, reshard: bool | None, reduce_dtype: torch.dtype | None
) -> None:
    """Behaviour 143, 144, 189, 190: no memory is freed before its last use; at most two units, and nothing is left."""
    mesh = mesh_2d(1, world_size) if hsdp else None
    options = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(None, reduce_dtype)}
    expected = train(in_units(make_model(), **options), rank)
    with pytest.MonkeyPatch.context() as monkeypatch, detecting() as detector:
        monkeypatch.setattr(GlooComm, "direct_min_bytes", 4096)  # weights direct, biases packed
        streams, watch = detector.streams, detector.resized
        actual = train(in_units(make_model(), **options), rank)
        if reshard is not False:
            # Two units, the one that computes and the one that is gathered, and the packed lane's few biases.
            unit_bytes = sum(param.nbytes for param in make_model()[0].parameters())
            assert unit_bytes * 1.9 < watch.most_bytes < unit_bytes * 2.1
        assert watch.num_freed > 0 and watch.streams == {"gather"}
        assert not watch.alive, "everything is given back at the end of backward"
    assert all(map(torch.equal, actual, expected))
    assert streams.has_waited_for(streams.clocks["reduce"]), "compute has waited for every reduction"


@on_ranks(2)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_gather_overlaps_the_compute_before_it(rank: int, world_size: int, num_groups: int) -> None:
    """Behaviour 145: when unit i is gathered in forward, its stream has not waited for compute i-1, but for i-2."""
    seen: list[tuple[int, int]] = []
    with detecting() as detector:
        streams = detector.streams
        model = make_model()
        ends: list[dict[str, int]] = []
        for index, block in enumerate(model):
            if num_groups == 2:
                block.register_parameter("scalar", nn.Parameter(torch.ones(())))  # on no mesh

            def begin(module: nn.Module, args: object, index: int = index) -> None:
                # Registered before fully_shard, so it runs after the gather was issued and before the compute.
                with streams.gathering():
                    seen.append((index, sum(streams.has_waited_for(end) for end in ends)))

            def end(module: nn.Module, args: object, output: object) -> None:
                ends.append(streams.tick())

            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)
            fully_shard(block)
        fully_shard(model)
        with torch.no_grad():
            model(torch.randn(2, 64))
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


@on_ranks(2)
def test_an_inner_module_alone_waits_for_the_optimizer(rank: int, world_size: int) -> None:
    """Called between steps, without its root: its gather reads what the step before has written."""
    with detecting():
        model = sharded_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            backward_of(model)
            optimizer.step()
            with torch.no_grad():
                model[0](X)


@on_ranks(2)
def test_tied_weights_that_are_unsharded_before_the_first_forward(rank: int, world_size: int) -> None:
    """One unit's memory listed the weight as released, while the other, which borrows it, computed with it."""
    with detecting() as detector:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model[0].unshard()
        model[0].reshard()
        model[1].unshard()
        freed = detector.resized.num_freed
        model(X).sum().backward()
        assert detector.resized.num_freed > freed
