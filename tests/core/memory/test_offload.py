"""CPU offload: sharded parameters, gradients and optimizer state in host memory (tests/behaviour.md, section S).

With a CPU mesh nothing moves, but all rules hold. `FSDP_API=torch` runs this file on torch's own FSDP2, which shows
that what is expected here is what users know.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from tests.helpers.models import linears, reference_grads, run_step
from tests.helpers.parity_models import Layers, Stack, assert_gradients, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks

ON_TORCH = os.environ.get("FSDP_API") == "torch"
api: Any = torch.distributed.fsdp if ON_TORCH else fsdp2


def offloaded(which: Any, model: nn.Module, **options: Any) -> Any:
    """`shard_blocks` with the policy that works without an accelerator."""
    return shard_blocks(which, model, offload_policy=which.CPUOffloadPolicy(pin_memory=False), **options)


def accumulate(model: Any, step: int, rank: int, setter: str) -> Tensor:
    """Three microbatches, the setter's flag on for the last one only."""
    for micro in range(3):
        if isinstance(model, torch.distributed.fsdp.FSDPModule):
            getattr(model, setter)(micro == 2)
        loss = run_step(model, rank, 3 * step + micro, 8)
    return loss


MODES: dict[str, Callable[[Any, int, int], Tensor]] = {
    "one_batch": lambda model, step, rank: run_step(model, rank, step, 8),
    "no_sync": lambda model, step, rank: accumulate(model, step, rank, "set_requires_gradient_sync"),
    "no_all_reduce": lambda model, step, rank: accumulate(model, step, rank, "set_requires_all_reduce"),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("raf", [True, False])
def test_same_bits(rank: int, world_size: int, mode: str, hsdp: bool, raf: bool) -> None:
    """Behaviour 156: parameters, gradients and optimizer state are those without offload, bit by bit, at every step."""
    options: dict[str, Any] = {"mesh": mesh_2d(2, world_size // 2) if hsdp else None, "reshard_after_forward": raf}
    plain = Stack(depth=2)
    models = [
        offloaded(api, copy.deepcopy(plain), **options),
        shard_blocks(api, copy.deepcopy(plain), **options),
    ]
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        for model, optim in zip(models, optims, strict=True):
            optim.zero_grad()
            MODES[mode](model, step, rank)
            optim.step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(local(one), local(other)) and torch.equal(local(one.grad), local(other.grad))
            for state, wanted in zip(optims[0].state[one].values(), optims[1].state[other].values(), strict=True):
                assert torch.equal(local(state), local(wanted))


@on_ranks(2, 4)
def test_everything_is_in_host_memory(rank: int, world_size: int) -> None:
    """Behaviour 155: parameters and gradients, and so the state that the optimizer makes of them; not pinned, as
    asked."""
    model = offloaded(api, Layers(2, 5))
    optim = torch.optim.Adam(model.parameters())
    run_step(model, rank, 0, 5)
    optim.step()
    state = [value for each in optim.state.values() for value in each.values()]
    tensors = [*model.parameters(), *(param.grad for param in model.parameters()), *state]
    assert len(tensors) == 3 * (2 + 3)
    assert all(local(tensor).device.type == "cpu" and not local(tensor).is_pinned() for tensor in tensors)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_parameters_left_on_meta(rank: int, world_size: int) -> None:
    """Behaviour 157, 32: the error of the first forward names what is not in host memory, and where it is."""
    model = Layers(2)
    model.layers[0].to("meta")
    offloaded(api, model)
    with pytest.raises(RuntimeError) as info:
        model(batch(0, rank, 4))
    text = str(info.value)
    assert "layers.0.weight" in text and "meta" in text
    assert "layers.1.weight" not in text


@on_ranks(2)
def test_loading_in_parts(rank: int, world_size: int) -> None:
    """Behaviour 157: `load_state_dict(assign=True, strict=False)` of some while others are still on meta; then it
    trains."""
    plain = Layers(2)
    with torch.device("meta"):
        model: Any = offloaded(api, Layers(2))
    for names in (["layers.0.weight"], ["layers.1.weight", "scale"]):
        part = {
            name: distribute_tensor(plain.get_parameter(name).detach(), model.get_parameter(name).device_mesh)
            for name in names
        }
        sharded = {
            name: value.redistribute(placements=model.get_parameter(name).placements) for name, value in part.items()
        }
        model.load_state_dict(sharded, assign=True, strict=False)
        assert all(model.get_parameter(name).device.type == "cpu" for name in names)
        assert (model.scale.device.type == "meta") == ("scale" not in names)
    run_step(model, rank)
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
@pytest.mark.skipif(ON_TORCH, reason="about objects of torch given to fsdp2")
def test_torchs_policy_object(rank: int, world_size: int) -> None:
    """Behaviour 1, 155: the policy of torch's FSDP2 may be passed as it is."""
    plain = linears(1)
    policy = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    model = fsdp2.fully_shard(copy.deepcopy(plain), offload_policy=policy)
    run_step(model, rank)
    assert_gradients(model, reference_grads(plain, world_size))
