"""Programs for the detector: what is in host memory for a while."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import fsdp2
import fsdp2.extras.one_block as shard_memory
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, offload_optimizer, step_in_backward
from fsdp2.extras.host_memory import standing_for_host
from tests.instruments.races.detector import HOME
from tests.instruments.races.host import host_memory
from tests.instruments.races.nets import Look, batch, net, results, sharded, step

__all__ = ["OF_OFFLOAD"]


def offload(rank: int, look: Look) -> list[Tensor]:
    """Sharded parameters, gradients and optimizer in host memory, and an evaluation before each step."""
    with nullcontext(CPUOffloadPolicy(pin_memory=False)) if look is None else host_memory(look) as policy:
        model = sharded(net(), offload_policy=policy, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for number in range(3):
            step(model, rank, number)
            with torch.no_grad():
                model(batch(rank, number))
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
        return results(model)


def stepped_aside(rank: int, look: Look) -> list[Tensor]:
    """Units are stepped on a stream of their own, behind the next forward and behind backward; a look in between."""
    seen = []
    for in_backward in (False, True):
        model = sharded(net(5), offload_policy=Offload(), reshard_after_forward=not in_backward)
        optimizer = offload_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        if in_backward:
            step_in_backward(optimizer)
        for number in range(3):
            step(model, rank, number)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                seen += [param.detach().square().to_local() for param in model[0].parameters()]
        seen += results(model)
    return seen


@contextmanager
def moves(look: Look) -> Iterator[None]:
    """What the library keeps in host memory is there."""
    if look is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, host_memory(look), standing_for_host(HOME):
        patch.setattr(shard_memory, "can_carve", lambda tensor: False)  # as on an accelerator
        patch.setattr(Tensor, "is_cpu", property(look.belongs_to_host))
        yield


def trained_aside(policy: Offload, rank: int, look: Look) -> list[Tensor]:
    """With an evaluation before a step, a look at parameters and state, a state that is loaded, and gradients that are
    zeroed."""
    with moves(look):
        model = sharded(net(4), offload_policy=policy)
        optimizer = offload_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        seen: list[Tensor] = []
        saved = None
        for number in range(6):
            step(model, rank, number)
            if number == 2:
                with torch.no_grad():
                    model(batch(rank, number))
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 4)
            if number == 1:
                seen += [param.detach().square().to_local() for param in model[0].parameters()]
                seen += [state["momentum_buffer"].to_local().clone() for state in optimizer.state.values()]
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 2:
                assert saved is not None
                optimizer.load_state_dict(saved)
        return [*seen, *results(model)]


def staged_states(rank: int, look: Look) -> list[Tensor]:
    """The device steps, on copies of states that rest in host memory."""
    return trained_aside(Offload(), rank, look)


def stepped_by_host(rank: int, look: Look) -> list[Tensor]:
    """The host steps copies of the parameters; and parameters that it has."""
    return [
        *trained_aside(Offload(grads=True), rank, look),
        *trained_aside(Offload(grads=True, params=True), rank, look),
    ]


def activations(rank: int, look: Look) -> list[Tensor]:
    """Saved activations are in host memory for a while: all, and as many as a budget requires. One backward ends early,
    when what the block before has saved is under way."""
    grads = []
    with moves(look):
        for budget in (0, 4 * 32 * 4):
            model = net(4)
            fsdp2.offload_activations([*model], budget=budget, min_bytes=0)
            x = batch(rank, 0)
            for number in range(3):
                out, middle = x, x
                for block in model:
                    out, middle = block(out), out
                loss = out.square().mean()
                if number == 1:
                    grads += torch.autograd.grad(loss, middle)
                else:
                    loss.backward()
                del out, middle, loss
            grads += [param.grad.clone() for param in model.parameters()]
    return grads


OF_OFFLOAD: dict[str, tuple[int, Callable[[int, Look], list[Tensor]]]] = {
    "offload": (2, offload),
    "stepped_aside": (2, stepped_aside),
    "staged_states": (2, staged_states),
    "stepped_by_host": (2, stepped_by_host),
    "activations": (2, activations),
}
