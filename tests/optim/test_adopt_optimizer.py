"""`fsdp2.adopt_optimizer`, and the warning for optimizers that hold what `fully_shard` has replaced."""

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
import fsdp2.checkpoint
from fsdp2.init import materialize, seeded
from fsdp2.optim import adopt_optimizer, local_optimizer
from tests.helpers.parity_models import (
    Stack,
    TiedLm,
    assert_same,
    batch,
    full,
    local,
    mesh_2d,
    shard_blocks,
    shard_like,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import mesh_of

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "local adamw": (functools.partial(local_optimizer, torch.optim.AdamW), {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, dim: int = 8) -> None:
    """One step on the same batch on every rank, so that one process is the reference."""
    optimizer.zero_grad()
    model(batch(number, 0, dim)).square().mean().backward()
    optimizer.step()


@contextmanager
def stale_warnings() -> Iterator[list[str]]:
    """The texts of the warnings about replaced parameters."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    found = [str(each.message) for each in caught]
    texts += [text for text in found if "do not change" in text]


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_training_goes_on(rank: int, world_size: int, kind: str, steps_before: int, hsdp: bool) -> None:
    """The state of an optimizer made before sharding, eager state of Adagrad included, is not lost (ACC#4142, 3859)."""
    cls, options = KINDS[kind]
    torch.manual_seed(0)
    plain = Stack(depth=1)  # uneven and empty shards
    plain.blocks[0].norm.requires_grad_(False)
    reference = cls([{"params": plain.blocks.parameters()}, {"params": plain.out.parameters(), "lr": 0.03}], **options)
    model: Any = copy.deepcopy(plain)
    optimizer = cls([{"params": model.blocks.parameters()}, {"params": model.out.parameters(), "lr": 0.03}], **options)
    for number in range(steps_before):
        step(plain, reference, number)
        step(model, optimizer, number)
    optimizer.zero_grad()
    shard_blocks(fsdp2, model, mesh=mesh_2d(2, world_size // 2) if hsdp else None)
    adopt_optimizer(optimizer)
    adopt_optimizer(optimizer)  # nothing is left to do
    expected = [list(model.blocks.parameters()), list(model.out.parameters())]
    for group, params in zip(optimizer.param_groups, expected, strict=True):
        assert all(a is b for a, b in zip(group["params"], params, strict=True))
    assert optimizer.param_groups[1]["lr"] == 0.03
    for number in range(steps_before, 4):
        check_state(plain, reference, model, optimizer)
        step(plain, reference, number)
        with stale_warnings() as texts:
            step(model, optimizer, number)
        assert not texts
    check_state(plain, reference, model, optimizer)
    for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_same(name, full(param), other, False, 1e-5, 1e-6)


def check_state(plain: nn.Module, reference: Any, model: nn.Module, optimizer: Any) -> None:
    assert len(optimizer.state) == len(reference.state)
    for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if other not in reference.state:
            assert param not in optimizer.state
            continue
        for key, wanted in reference.state[other].items():
            value = optimizer.state[param][key]
            assert isinstance(value, DTensor) == (wanted.ndim > 0)
            if wanted.ndim > 0:
                assert (value.placements, value.shape) == (param.placements, param.shape)
                assert local(value).stride() == local(param).stride()
                wanted = shard_like(wanted, param)
            assert_same(f"{key} of {name}", local(value), wanted, False, 1e-5, 1e-6)


@on_ranks(2)
def test_what_is_not_sharded_stays(rank: int, world_size: int) -> None:
    """Tied parameters become one; ignored ones, and those of other models, stay what they are, with their state."""
    model, elsewhere = TiedLm(), nn.Linear(2, 2)
    ignored = model.blocks[0].norm
    optimizer = torch.optim.Adagrad([*model.parameters(), *elsewhere.parameters()], lr=0.1)
    kept = [*ignored.parameters(), *elsewhere.parameters()]
    states = [optimizer.state[param] for param in kept]
    shard_blocks(fsdp2, model, ignored_params=set(ignored.parameters()))
    adopt_optimizer(optimizer)
    held = optimizer.param_groups[0]["params"]
    assert {id(param) for param in held} == {id(param) for param in [*model.parameters(), *kept]}
    assert len(held) == len(optimizer.state) == len({id(param) for param in held})
    assert all(optimizer.state[param] is state for param, state in zip(kept, states, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("made", ["before", "while_unsharded"])
def test_warning(rank: int, world_size: int, made: str) -> None:
    """It steps on tensors that nobody uses (PT#149205), and says so, once, with names, until it is adopted."""
    model: Any = Stack(depth=1)
    optimizer: Any = None
    if made == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shard_blocks(fsdp2, model, reshard_after_forward=False)
    if made == "while_unsharded":
        model(batch(0, rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        assert not any(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
    before = local(model.inp.weight.detach()).clone()
    with stale_warnings() as texts:
        optimizer.step()
        optimizer.step()
    (text,) = texts
    assert "AdamW holds 9 parameters" in text and "adopt_optimizer" in text and ".weight" in text
    adopt_optimizer(optimizer)
    with stale_warnings() as texts:
        step(model, optimizer, 0)
    assert not texts
    assert not torch.equal(local(model.inp.weight.detach()), before)


@on_ranks(2)
def test_no_warning_without_a_reason(rank: int, world_size: int) -> None:
    """Optimizers of plain and of sharded models are silent. A group added later is looked at."""
    model, plain = shard_blocks(fsdp2, Stack(depth=1)), nn.Linear(2, 2)
    original = nn.Linear(2, 2)
    stale = list(original.parameters())
    fsdp2.fully_shard(original)
    optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
    with stale_warnings() as texts:
        optimizer.step()
    assert not texts
    optimizer.add_param_group({"params": stale})
    with stale_warnings() as texts:
        optimizer.step()
    assert len(texts) == 1 and "holds 2 parameters" in texts[0]


@on_ranks(4)
@pytest.mark.parametrize("tp_dim", [0, 1])
def test_tensor_parallel(rank: int, world_size: int, tp_dim: int) -> None:
    """State that is DTensors on the tensor-parallel mesh becomes DTensors on the joint mesh."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = nn.Linear(6, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(tp_dim)]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    whole = torch.arange(48.0).view(8, 6)
    optimizer.state[model.weight]["sum"] = distribute_tensor(whole, mesh["tp"], [Shard(tp_dim)])
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    adopt_optimizer(optimizer)
    (held,) = optimizer.param_groups[0]["params"]
    adopted = optimizer.state[held]["sum"]
    assert held is model.weight and adopted.placements == held.placements and adopted.device_mesh.ndim == 2
    assert torch.equal(adopted.full_tensor(), whole)


# --- made before the model had values -------------------------------------------------------------------------------

ROUTES = ["to_empty", "materialize", "load"]


@on_ranks(2)
@pytest.mark.parametrize("made_by", ["torch", "local_optimizer"])
@pytest.mark.parametrize("route", ROUTES)
def test_made_before_the_model_has_memory(rank: int, world_size: int, tmp_path: Any, route: str, made_by: str) -> None:
    """Every way to materialise keeps the parameter objects, but torch's `to_empty` of what no unit manages (`out`)."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = Stack(depth=2)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    make: Any = torch.optim.AdamW if made_by == "torch" else functools.partial(local_optimizer, torch.optim.AdamW)
    optimizer = make(model.parameters(), lr=1e-2)
    before = list(model.parameters())
    if route == "to_empty":
        model.to_empty(device="cpu")
        with seeded(0):
            model.apply(lambda module: getattr(module, "reset_parameters", int)())
    elif route == "materialize":
        materialize(model, seed=0)
    else:
        plain = Stack(depth=2)
        if rank == 0:
            save_file(plain.state_dict(), tmp_path / "model.safetensors")
        dist.barrier()
        fsdp2.checkpoint.load(tmp_path, model=model)
    kept = [now is then for now, then in zip(model.parameters(), before, strict=True)]
    assert all(kept) or route == "to_empty"
    values = [local(param).clone() for param in model.parameters()]
    with stale_warnings() as texts:
        step(model, optimizer, 0)
    changed = [not torch.equal(local(p), v) or not v.numel() for p, v in zip(model.parameters(), values, strict=True)]
    assert changed == kept
    assert bool(texts) == (route == "to_empty"), texts  # of the parameters that torch has replaced


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_were_assigned(rank: int, world_size: int, kind: str) -> None:
    """After `load_state_dict(assign=True)` steps change nothing, as in torch: said so, until it is adopted."""
    torch.manual_seed(0)
    model: Any = Stack(depth=1)
    shard_blocks(fsdp2, model)
    cls, options = KINDS[kind]
    optimizer = cls(model.parameters(), **options)
    step(model, optimizer, 0)
    trained = dict(model.named_parameters())
    other = {name: nn.Parameter(param.detach().clone()) for name, param in trained.items()}
    model.load_state_dict(other, assign=True)
    model(batch(1, 0, 8))
    model.load_state_dict(trained, assign=True)
    with stale_warnings() as texts:
        step(model, optimizer, 1)
    assert not texts and all(param is trained[name] for name, param in model.named_parameters())
    model.load_state_dict(other, assign=True)
    with stale_warnings() as texts:
        step(model, optimizer, 2)
    assert len(texts) == 1 and "assign=True" in texts[0]
    states = {name: optimizer.state[param] for name, param in trained.items()}
    adopt_optimizer(optimizer)
    for name, param in model.named_parameters():
        assert all(optimizer.state[param][key] is value for key, value in states[name].items())
    with stale_warnings() as texts:
        step(model, optimizer, 2)
    assert not texts
