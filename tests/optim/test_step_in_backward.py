"""`fsdp2.step_in_backward`: what a step after backward gives, bit by bit, with the gradients of one unit at a time."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import checkpoint
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.optim import clip_grad_norm_, clip_grads_with_norm_, local_optimizer, step_in_backward
from tests.helpers.optimizers import Optim, assert_same
from tests.helpers.parity_models import Stack, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import mesh_of

OPTIMIZERS: dict[str, Callable[[Any], Optim]] = {
    "local_adamw": lambda params: local_optimizer(torch.optim.AdamW, params, lr=1e-2, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "local_adagrad": lambda params: local_optimizer(torch.optim.Adagrad, params, lr=1e-2),  # its state is there at once
}


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).float().square().mean()


def train(model: Any, optimizer: Optim, rank: int, steps: range, micro: Callable[[Any, bool], object]) -> None:
    """Steps of three microbatches with a scheduler, whether backward steps or not; `micro` comes before each."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for step in steps:
        for number in range(3):
            micro(model, number == 2)
            loss_of(model, 3 * step + number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


MICRO: dict[str, Callable[[Any, bool], object]] = {
    "no_sync": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "is_last": lambda model, is_last: model.set_is_last_backward(is_last),
    "no_all_reduce": lambda model, is_last: model.set_requires_all_reduce(is_last),
}


def tensor_parallel(world_size: int) -> DeviceMesh:
    return mesh_of((world_size // 2, 2), ("dp", "tp"))


OTHERS = [("fsdp", "is_last"), ("hsdp", "no_all_reduce"), ("tp", "is_last")]
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp": lambda world_size: {},
    "hsdp": lambda world_size: {"mesh": mesh_2d(2, world_size // 2)},
    "replicated": lambda world_size: {"zero": fsdp2.ZeroPolicy(stage=0)},
    "kept": lambda world_size: {"reshard_after_forward": False},
    "bf16": lambda world_size: {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": lambda world_size: {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    "tp": lambda world_size: {"mesh": tensor_parallel(world_size)["dp"]},
}


def sharded(kind: str, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Stack(dim=8, hidden=6 if kind == "tp" else 5, depth=2)
    for block in model.blocks if kind == "tp" else ():
        parallelize_module(
            block, tensor_parallel(world_size)["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return shard_blocks(fsdp2, model, **KINDS[kind](world_size))


def pair(kind: str, world_size: int, optimizer: str, **options: Any) -> list[tuple[Any, Optim]]:
    """Two equal models with optimizers; backward steps the second."""
    result = []
    for in_backward in (False, True):
        model = sharded(kind, world_size)
        decayed = [param for param in model.parameters() if param.ndim > 1]
        rest = [param for param in model.parameters() if param.ndim <= 1]
        optim = OPTIMIZERS[optimizer]([{"params": decayed}, {"params": rest, "weight_decay": 0.3}])
        if in_backward:
            step_in_backward(optim, **options)
        result.append((model, optim))
    return result


@on_ranks(2, 4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("kind", "micro"), [*((kind, "no_sync") for kind in KINDS if kind != "tp"), *OTHERS])
def test_equals_a_step_after_backward(rank: int, world_size: int, optimizer: str, kind: str, micro: str) -> None:
    """Parameters and state, bit by bit, with accumulation, a scheduler and two param groups."""
    (ours, theirs) = pair(kind, world_size, optimizer)
    for model, optim in (ours, theirs):
        train(model, optim, rank, range(3), MICRO[micro])
    assert_same(ours[1], theirs[1])
    assert all(param.grad is None for param in theirs[0].parameters())


@on_ranks(2)
def test_gradients_of_one_unit_at_a_time(rank: int, world_size: int) -> None:
    """Each unit is stepped once, from the last to the first but for the root, when no other has sharded gradients."""
    model = shard_blocks(fsdp2, Stack(dim=8, hidden=5, depth=4))
    names = {param: name for name, param in model.named_parameters()}
    seen: list[tuple[set[str], set[str]]] = []

    def note(params: list[Tensor]) -> None:
        there = {name for param, name in names.items() if param.grad is not None}
        seen.append(({names[param] for param in params}, there))

    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1), clip=note)
    loss_of(model, 0, rank).backward()
    assert all(stepped == there for stepped, there in seen)
    units = [min(stepped).rpartition(".")[0].removesuffix(".down") for stepped, _ in seen]
    assert units == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "inp"]
    assert sorted(name for stepped, _ in seen for name in stepped) == sorted(names.values())


@on_ranks(2)
@pytest.mark.parametrize("how", ["value", "norm"])
def test_clipping(rank: int, world_size: int, how: str) -> None:
    """By value, and by the norm of each unit: as by hand after backward."""
    clips: dict[str, Callable[[Any], object]] = {
        "value": lambda params: nn.utils.clip_grad_value_(params, 0.01),
        "norm": lambda params: clip_grad_norm_(params, 0.05),
    }
    (after, optim), (within, stepped) = pair("fsdp", world_size, "adamw", clip=clips[how])
    for step in range(3):
        loss_of(within, step, rank).backward()
        loss_of(after, step, rank).backward()
        in_units = [list(block.parameters()) for block in after.blocks]
        in_units.append([*after.inp.parameters(), *after.out.parameters()])
        for params in in_units:
            clips[how](params)
        optim.step()
        optim.zero_grad()
    assert_same(optim, stepped)


@on_ranks(2)
def test_the_norm_of_all_gradients_is_refused(rank: int, world_size: int) -> None:
    """It is known too late. Without the error nothing would be clipped, silently: there are no gradients."""
    _, (model, _) = pair("fsdp", world_size, "adamw")
    loss_of(model, 0, rank).backward()
    with pytest.raises(OrderError, match=r"clip=lambda params: fsdp2\.clip_grad_norm_.*offload_optimizer saves"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(OrderError, match="step_in_backward"):
        clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0))
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    clip_grad_norm_([other], 1.0)


@on_ranks(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_grad_scaler_is_refused(rank: int, world_size: int, fused: bool, unscales: bool) -> None:
    model = sharded("fsdp", world_size)
    optim = torch.optim.AdamW(model.parameters(), fused=fused)
    stepper = step_in_backward(optim)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    if unscales:
        scaler.unscale_(optim)
    with pytest.raises(OrderError, match="GradScaler cannot step this AdamW"):
        scaler.step(optim)
    stepper.remove()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    scaler.step(optim)
    assert optim.state[model.inp.weight]["step"] == 2


@on_ranks(2)
def test_saved_and_resumed(rank: int, world_size: int, tmp_path: Path) -> None:
    """State dicts and checkpoints of the one optimizer: a resumed job continues bit by bit."""
    _, (model, optim) = pair("fsdp", world_size, "local_adamw")
    train(model, optim, rank, range(2), MICRO["no_sync"])
    state = copy.deepcopy(optim.state_dict())
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optim)
    train(model, optim, rank, range(2, 4), MICRO["no_sync"])
    for by_file in (True, False):
        _, (again, other) = pair("fsdp", world_size, "local_adamw")
        train(again, other, rank, range(1), MICRO["no_sync"])  # it has state of its own, which the saved one replaces
        checkpoint.load(tmp_path / "saved", model=again, optimizer=other if by_file else None)
        if not by_file:
            other.load_state_dict(state)
        train(again, other, rank, range(2, 4), MICRO["no_sync"])
        assert_same(optim, other)


@on_ranks(2)
def test_what_no_unit_manages_waits_for_the_step(rank: int, world_size: int) -> None:
    """Parameters outside of units, and those of another optimizer."""
    model = sharded("fsdp", world_size)
    plain = nn.Parameter(torch.ones(3))
    first, rest = list(model.blocks[0].parameters()), list(model.blocks[1].parameters())
    optim = torch.optim.SGD([*first, plain], lr=1.0)
    step_in_backward(optim)
    other = torch.optim.SGD(rest, lr=1.0)
    step_in_backward(other)
    plain.grad = torch.ones(3)
    before = [local(param.detach()).clone() for param in model.parameters()]
    loss_of(model, 0, rank).backward()
    assert torch.equal(plain.detach(), torch.ones(3))
    optim.step()
    assert torch.equal(plain.detach(), torch.zeros(3))
    for value, (name, param) in zip(before, model.named_parameters(), strict=True):
        assert (param.grad is None) == name.startswith("blocks"), name
        assert not name.startswith("blocks") or not local(param).numel() or not torch.equal(local(param), value), name


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="none of the 2 parameters of this SGD"):
        step_in_backward(torch.optim.SGD(plain.parameters()))
    model = sharded("fsdp", world_size)
    with pytest.raises(ArgumentError, match="LBFGS"):
        step_in_backward(torch.optim.LBFGS(model.parameters()))
    optim = torch.optim.SGD(model.parameters())
    step_in_backward(optim)
    with pytest.raises(ArgumentError, match="already"):
        step_in_backward(optim)

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    model = sharded("fsdp", world_size)
    step_in_backward(Counting(model.parameters()))
    with pytest.raises(ArgumentError, match=r"Counting changes the options \['k'\]"):
        loss_of(model, 0, rank).backward()


@on_ranks(2)
def test_lifetime(rank: int, world_size: int) -> None:
    """Nobody holds the model. Its copy trains without the optimizer, which does not hold its parameters."""
    model = sharded("fsdp", world_size)
    optim = OPTIMIZERS["local_adamw"](model.parameters())
    step_in_backward(optim)
    loss_of(model, 0, rank).backward()
    copied = copy.deepcopy(model)
    loss_of(copied, 0, rank).backward()
    assert all(param.grad is not None for param in copied.parameters())
    weak, weight = weakref.ref(model), weakref.ref(model.inp.weight)
    gc.disable()
    try:
        del model
        assert weak() is None
        del optim, copied
        assert weight() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_parameters_that_come_after_the_first_step(rank: int, world_size: int) -> None:
    """Added to the optimizer between steps, or put in the place of others (a load that assigns): they are stepped."""
    model = fsdp2.fully_shard(nn.Linear(4, 4))
    held: list[Any] = [model.weight]
    optimizer = torch.optim.SGD(held, lr=0.1)
    step_in_backward(optimizer)
    held = optimizer.param_groups[0]["params"]
    for change in ("nothing", "add", "replace"):
        if change == "add":
            held.append(model.bias)
        elif change == "replace":
            model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
            held[:] = model.parameters()
        before = [param.full_tensor() for param in held]
        model(batch(0, rank, 4)).square().sum().backward()
        assert not any(torch.equal(old, param.full_tensor()) for old, param in zip(before, held, strict=True)), change


class UsedOnceMore(nn.Module):
    """The gradient of `weight` is complete before the backward that reads its values for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.weight.detach()) + self.weight


@on_ranks(2, 1)
@pytest.mark.parametrize("stage", [0, 3])
def test_backward_reads_the_values_of_forward(rank: int, world_size: int, stage: int) -> None:
    """Replicated parameters are used as they are: the rest of the unit's backward still reads them."""
    grads = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model: Any = UsedOnceMore()
        for module in (model.inner, model):
            fsdp2.fully_shard(module, zero=fsdp2.ZeroPolicy(stage=stage))
        if in_backward:
            step_in_backward(torch.optim.SGD(model.parameters(), lr=1.0))
        x = batch(0, rank, 4).requires_grad_()
        model(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
