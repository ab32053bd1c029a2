"""CPU offload (tests/behaviour.md, section S). With a CPU mesh nothing moves, but all rules hold."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fsdp2 import CPUOffloadPolicy
from tests.helpers.models import run_step
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import Layers, Stack, batch, local, mesh_2d
from tests.helpers.ranks import on_ranks


def offloaded(plain: nn.Module, **options: Any) -> Any:
    """With the policy that works without an accelerator."""
    return in_units(plain, offload_policy=CPUOffloadPolicy(pin_memory=False), **options)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("raf", [True, False])
def test_same_bits(rank: int, world_size: int, setter: str, hsdp: bool, raf: bool) -> None:
    """Behaviour 155, 156: parameters, gradients and optimizer state are bit by bit those without offload."""
    options: dict[str, Any] = {"mesh": mesh_2d(2, world_size // 2) if hsdp else None, "reshard_after_forward": raf}
    plain = Stack(depth=2)
    models = [offloaded(plain, **options), in_units(plain, **options)]
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        for model, optim in zip(models, optims, strict=True):
            optim.zero_grad()
            for micro in range(3):
                getattr(model, setter)(micro == 2)
                run_step(model, rank, 3 * step + micro, 8)
            optim.step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert not local(one).is_pinned() and not local(one.grad).is_pinned(), "as asked"
            assert torch.equal(local(one), local(other)) and torch.equal(local(one.grad), local(other.grad))
            for state, wanted in zip(optims[0].state[one].values(), optims[1].state[other].values(), strict=True):
                assert torch.equal(local(state), local(wanted))


@on_ranks(2)
def test_parameters_left_on_meta(rank: int, world_size: int) -> None:
    """Behaviour 32, 157: the error of the first forward names what is not in host memory, and where it is."""
    plain = Layers(2)
    plain.layers[0].to("meta")
    with pytest.raises(RuntimeError) as info:
        offloaded(plain)(batch(0, rank, 4))
    text = str(info.value)
    assert "layers.0.weight" in text and "meta" in text and "layers.1.weight" not in text


@on_ranks(2)
def test_loading_in_parts(rank: int, world_size: int) -> None:
    """Behaviour 1, 155, 157: by `load_state_dict(assign=True, strict=False)` while others are on meta; then it trains.
    The policy is that of torch's FSDP2."""
    plain = Layers(2)
    with torch.device("meta"):
        meta = Layers(2)
    model = in_units(meta, offload_policy=torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False))
    for names in (["layers.0.weight"], ["layers.1.weight", "scale"]):
        wanted = {name: (plain.get_parameter(name).detach(), model.get_parameter(name)) for name in names}
        part = {name: distribute_tensor(value, to.device_mesh, to.placements) for name, (value, to) in wanted.items()}
        model.load_state_dict(part, assign=True, strict=False)
        assert all(model.get_parameter(name).device.type == "cpu" for name in names)
        assert (model.scale.device.type == "meta") == ("scale" not in names)
    check(model, plain, rank, world_size)
