"""Which unit is the root, when that is decided, and what it decides (tests/behaviour.md, section E)."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import FSDPError, MixedPrecisionPolicy, events, fully_shard, share_comm_ctx
from tests.helpers.models import error_of, is_sharded, is_unsharded, linears, reference_grads, units
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import assert_gradients, batch
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import X, assert_same_gradients, backward_of, sharded_layers, two_layers


@on_ranks(2)
def test_names_and_order(rank: int, world_size: int) -> None:
    """Behaviour 38: FQNs relative to the root, which is ``""``; units in the order of the module tree."""
    outer = nn.Sequential(OrderedDict(encoder=nn.Sequential(OrderedDict(layers=linears(2))), decoder=linears(1)))
    root = outer.encoder
    fully_shard(root.layers[1])
    fully_shard(root.layers[0])
    fully_shard(root)
    fully_shard(outer.decoder)
    with events.record() as log:
        outer(batch(0, rank, 4)).sum().backward()
    assert units(log, "pre_forward") == ["", "layers.0", "layers.1", ""]
    assert units(log, "root_pre_forward") == ["", ""]


@on_ranks(2, timeout_s=20)
def test_one_rank_shards_alone(rank: int, world_size: int) -> None:
    """Behaviour 37: rank 1 does nothing meanwhile, and gets here late."""
    mesh = init_device_mesh("cpu", (world_size,))
    if rank == 0:
        model = nn.Sequential(*linears(2))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        model.set_reshard_after_forward(False)
        model.set_requires_gradient_sync(False)
        model.set_gradient_divide_factor(2.0)
        model[0].set_modules_to_forward_prefetch([model[1]])
        model.state_dict()
    dist.barrier()


@on_ranks(2)
def test_child_before_root(rank: int, world_size: int) -> None:
    """Behaviour 37, 39: a child that ran alone first is a root; running its parent then is an error naming it."""
    model = in_units(linears(2))
    model[1](batch(0, rank, 4))
    text = error_of(RuntimeError, lambda: model(batch(0, rank, 4)))
    assert "'1' ran its forward before the module that contains it and became a root itself. Run the outermost" in text
    assert "register_fsdp_forward_method" in text


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_unshard_of_a_child_before_the_root_ran(rank: int, world_size: int, reshard: bool) -> None:
    """Behaviour 39, 79: allowed, and what is gathered is not gathered again."""
    plain = linears(2)
    model = in_units(plain)
    model[1].unshard()
    assert is_unsharded(model[1]) and is_sharded(model[0])
    if reshard:
        model[1].reshard()
        assert is_sharded(model[1])
    with events.record() as log:
        loss = model(batch(0, rank, 4)).square().mean()
    assert units(log, "all_gather") == (["0", "1"] if reshard else ["0"])
    loss.backward()
    assert is_sharded(model)
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
def test_list_cannot_be_root(rank: int, world_size: int) -> None:
    """Behaviour 40: a unit of several modules has no single forward; the error says what to do."""
    model = linears(2)
    fully_shard([model[0], model[1]])
    text = error_of(RuntimeError, lambda: model[0](batch(0, rank, 4)))
    assert "such a unit cannot be the root. Call fully_shard on the module that contains them" in text


@on_ranks(2)
@pytest.mark.parametrize("raf", [None, True])
def test_two_roots_under_a_plain_parent(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 41: each keeps its own parameters after forward; prefetch does not cross from one to the other."""
    first = nn.Sequential(OrderedDict(a0=nn.Linear(4, 4), a1=nn.Linear(4, 4)))
    second = nn.Sequential(OrderedDict(b0=nn.Linear(4, 4), b1=nn.Linear(4, 4)))
    plain = nn.Sequential(first, second)
    model: Any = copy.deepcopy(plain)
    for stack in model:
        fully_shard(stack[0], reshard_after_forward=raf)
        fully_shard(stack, reshard_after_forward=raf)
    for step in range(2):
        model.zero_grad()
        loss = model(batch(step, rank, 4)).square().mean()
        assert all(is_sharded(stack[0]) and is_unsharded(stack[1]) == (raf is None) for stack in model)
        with events.record() as log:
            loss.backward()
        assert units(log, "root_post_backward") == ["", ""] and is_sharded(model)
        assert_gradients(model, reference_grads(plain, world_size, step))
        found = [(event.kind, event.unit) for event in log if event.kind in ("pre_backward", "unshard")]
        second_root = [index for index, each in enumerate(found) if each == ("pre_backward", "")][1]
        assert ("unshard", "b0") in found[:second_root] and ("unshard", "a0") not in found[:second_root]


class AnyInputs(nn.Module):
    """Takes whatever it is given and hands it back beside a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, first: Any, *, second: dict[str, Any], third: object = None) -> tuple[Tensor, Any, object]:
        return self.linear(first[0]) + second["x"], second, third


@pytest.mark.gpu
def test_inputs_move_to_the_accelerator() -> None:
    """Behaviour 16, 44: parameters, buffers and nested inputs go to the mesh's device, ignored parameters do not."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = AnyInputs()
        model.register_buffer("buffer", torch.ones(2))
        model.register_buffer("same_buffer", model.buffer)
        ignored = model.linear.bias
        fully_shard(model, ignored_params={ignored})
        assert model.linear.weight.device.type == "cuda" and model.buffer.device.type == "cuda"
        assert model.same_buffer is model.buffer
        assert model.linear.bias.device.type == "cpu"
        model.linear.bias = nn.Parameter(ignored.detach().cuda())
        output, inner, _ = model([torch.ones(4)], second={"x": torch.ones(4), "y": [torch.ones(1)]})
        assert output.device.type == inner["x"].device.type == inner["y"][0].device.type == "cuda"
    finally:
        dist.destroy_process_group()


# --- several roots in one process -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_weight_of_two_roots(rank: int, world_size: int) -> None:
    """It has two backwards, and would be reduced in the first one's only: refused."""
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
