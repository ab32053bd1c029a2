"""`Offload` and `offload_optimizer`: the training of a step without offload, bit by bit, although units are stepped in
the background.

With a CPU mesh nothing moves, but the step is deferred as on a device. The lagging device has copies that are late.
"""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import Offload, checkpoint, offload_optimizer
from fsdp2.errors import ArgumentError
from fsdp2.optim import local_optimizer
from fsdp2.optim.staged import StagedState
from tests.helpers.offloaded import Gate, optimizer_for, pending, step_late
from tests.helpers.optimizers import CASES, Optim, assert_same, params_in
from tests.helpers.parity_models import Stack, batch, local, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.instruments.races.detector import detecting

SETTINGS = {
    "states": Offload(),
    "states and gradients": Offload(grads=True),
    "all": Offload(grads=True, params=True),
    "half": Offload(grads=True, params=True, fraction=0.5),
    "not overlapped": Offload(grads=True, params=True, overlap=False),
    "two threads": Offload(threads=2),
}
ON_DISK = {  # with the folder of a test
    "disk": lambda folder: Offload(tier=folder),
    "two disks": lambda folder: Offload(grads=True, params=True, tier=[folder / "a", folder / "b"]),
    "files": lambda folder: Offload(grads=True, params="files", tier=[folder / "a", folder / "b"]),
    "half in files": lambda folder: Offload(grads=True, params="files", tier=folder, fraction=0.5),
}
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp": lambda world_size: {},
    "hsdp": lambda world_size: {"mesh": mesh_2d(2, world_size // 2)},
    "kept": lambda world_size: {"reshard_after_forward": False},
    "bf16": lambda world_size: {"mp_policy": BF16},
    "stage 0": lambda world_size: {"zero": fsdp2.ZeroPolicy(stage=0)},
    "stage 2": lambda world_size: {"zero": fsdp2.ZeroPolicy(stage=2)},
    "sharded replicas": lambda world_size: {
        "mesh": mesh_2d(2, world_size // 2),
        "zero": fsdp2.ZeroPolicy(shard_replicas=True),
    },
}


def policy_of(setting: str | None, folder: Path) -> Offload | None:
    return None if setting is None else ON_DISK[setting](folder) if setting in ON_DISK else SETTINGS[setting]


def stack(policy: Offload | None, kind: str = "fsdp", world_size: int = 2, depth: int = 2) -> Any:
    torch.manual_seed(0)
    options = KINDS[kind](world_size)
    if policy is not None:
        options["offload_policy"] = policy
    return shard_blocks(fsdp2, Stack(dim=8, hidden=5, depth=depth), **options)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.3}]


def train(
    model: Any, optimizer: Optim, rank: int, steps: range, *, clips: bool = True, micros: int = 2, sync: bool = True
) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for step in steps:
        for number in range(micros):
            model.set_requires_gradient_sync(sync or number == micros - 1)
            model(batch(micros * step + number, rank)).float().square().mean().backward()
        if clips:
            fsdp2.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


CASES_OF_TRAINING = [(setting, "fsdp") for setting in (*SETTINGS, *ON_DISK)]
CASES_OF_TRAINING += [(setting, kind) for kind in [*KINDS][1:] for setting in ("all", "files")]


@on_ranks(2, 4)
@pytest.mark.parametrize(("setting", "kind"), CASES_OF_TRAINING)
def test_same_bits(rank: int, world_size: int, setting: str, kind: str, tmp_path: Path) -> None:
    """With clipping, accumulation, groups and a scheduler (DeepSpeed issues 7981, 7967; prime-rl issue 3234)."""
    model, plain = stack(policy_of(setting, tmp_path), kind, world_size), stack(None, kind, world_size)
    ours = offload_optimizer(torch.optim.AdamW, grouped(model), lr=1e-2)
    theirs = torch.optim.AdamW(grouped(plain), lr=1e-2)
    clips = not setting.startswith("half")  # its units have two groups each, so the norm is added up in another order
    for each, optimizer in ((model, ours), (plain, theirs)):
        train(each, optimizer, rank, range(3), sync=kind != "stage 2", clips=clips)
    assert_same(ours, theirs)


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_any_optimizer(rank: int, world_size: int, case: str) -> None:
    kind, options = CASES[case]
    model, plain = stack(Offload()), stack(None)
    ours = offload_optimizer(kind, grouped(model), **copy.deepcopy(options))
    theirs = local_optimizer(kind, grouped(plain), **copy.deepcopy(options))
    for each, optimizer in ((model, ours), (plain, theirs)):
        train(each, optimizer, rank, range(3), clips=False)
    assert_same(ours, theirs)


def stepped(policy: Offload | None, rank: int, steps: int = 1) -> tuple[Any, Any]:
    """A model and its optimizer, after some steps."""
    model = stack(policy)
    optimizer = optimizer_for(model.parameters(), policy)
    train(model, optimizer, rank, range(steps))
    return model, optimizer


def full_values(model: Any, _optimizer: Any) -> list[Tensor]:
    with fsdp2.full_params(model, write_back=False):
        return [param.detach().clone() for param in model.parameters()]


def pickled(model: Any, _optimizer: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.save([*model.parameters()], file)
    file.seek(0)
    return [local(param.detach()) for param in torch.load(file, weights_only=False)]


def written(model: Any, _optimizer: Any) -> list[Tensor]:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return [local(param.detach()) for param in model.parameters()]


LOOKS: dict[str, Callable[[Any, Any], list[Tensor]]] = {
    "to_local": lambda model, _: [param.to_local() for param in model.parameters()],
    "full_tensor": lambda model, _: [param.full_tensor() for param in model.parameters()],
    "data": lambda model, _: [local(param.data) for param in model.parameters()],
    "state dict": lambda model, _: [local(value) for value in model.state_dict().values()],
    "state": lambda _, optimizer: [local(value["exp_avg"]) for value in optimizer.state.values()],
    "optimizer's state dict": lambda _, optimizer: [
        local(value["exp_avg_sq"]) for value in optimizer.state_dict()["state"].values()
    ],
    "deepcopy": lambda model, _: [local(param.detach()) for param in copy.deepcopy(model).parameters()],
    "to": lambda model, _: [local(param.detach()) for param in model.to(torch.float64).parameters()],
    "full_params": full_values,
    "pickle": pickled,
    "write": written,
    "forward": lambda model, _: [model(batch(0, 0)).detach()],
    "unshard": lambda model, _: [model.unshard() or param.detach().clone() for param in model.inp.parameters()],
}


@on_ranks(2)
def test_who_looks_waits(rank: int, world_size: int) -> None:
    """`step` returned, nothing is stepped yet, and yet everybody sees the parameters and the state after the step."""
    for name, look in LOOKS.items():
        model, optimizer = stepped(Offload(), rank)
        plain, reference = stepped(None, rank)
        gate = Gate()
        for each, optim in ((model, optimizer), (plain, reference)):
            each(batch(9, rank)).square().mean().backward()
            optim.step()
        assert len(pending(model)) == len([*model.parameters()])
        gate.open_soon()
        seen, expected = look(model, optimizer), look(plain, reference)
        assert len(seen) == len(expected) > 0, name
        assert all(map(torch.equal, seen, expected)), name
        optimizer.wait()
        assert not pending(model), name


@on_ranks(2)
def test_what_is_done_after_step_does_not_reach_it(rank: int, world_size: int) -> None:
    """A scheduler that changes the learning rate, a tensor in place, and zeroed gradients, while the step waits."""
    results = []
    for policy in (Offload(), None):
        model = stack(policy)
        optimizer = optimizer_for(model.parameters(), policy, torch.optim.Adam, lr=torch.tensor(1e-2), fused=True)
        for step in range(3):
            model(batch(step, rank)).square().mean().backward()
            step_late(optimizer)
            optimizer.param_groups[0]["lr"].fill_(1e-3 * step)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            (optimizer, model)[step % 2].zero_grad(set_to_none=step == 0)
        results.append(optimizer)
    assert_same(*results)


@on_ranks(2)
@pytest.mark.parametrize("setting", ["states", "disk", "files"])
def test_loads_between_step_and_use(rank: int, world_size: int, setting: str, tmp_path: Path) -> None:
    """`load_state_dict` of the model and of the optimizer comes after the step, whenever that runs."""
    model, optimizer = stepped(policy_of(setting, tmp_path), rank)
    plain, reference = stepped(None, rank)
    kept = copy.deepcopy((plain.state_dict(), reference.state_dict()))
    for each, optim in ((model, optimizer), (plain, reference)):
        each(batch(9, rank)).square().mean().backward()
        step_late(optim)
        each.load_state_dict(kept[0])
        optim.load_state_dict(copy.deepcopy(kept[1]))
        train(each, optim, rank, range(2, 4))
    assert_same(optimizer, reference)


@pytest.mark.parametrize("has_streams", [False, True])
@on_ranks(2)
def test_units_are_stepped_in_the_order_of_forward(rank: int, world_size: int, has_streams: bool) -> None:
    """From the second step on. (With streams it was the order of backward: the next forward waited for all steps.)"""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = Backwards()
    for layer in model.layers:
        fsdp2.fully_shard(layer, offload_policy=Offload())
    fsdp2.fully_shard(model)
    order: list[int] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            order.append(self.param_groups[0]["params"][0].data_ptr())
            return super().step(closure)

    optimizer = offload_optimizer(Noting, model.parameters(), lr=0.1, elementwise=True)
    with detecting() if has_streams else nullcontext():
        for step in range(2):
            model(batch(step, rank)).sum().backward()
            optimizer.step()
        assert not optimizer._known.recent  # a loop that never asks for the state keeps nothing of each step
        optimizer.wait()
    assert order[4:] == [local(layer.weight.detach()).data_ptr() for layer in reversed(model.layers)]


@on_ranks(2)
@pytest.mark.parametrize("setting", ["states", "disk", "files"])
def test_stepped_in_backward(rank: int, world_size: int, setting: str, tmp_path: Path) -> None:
    """Without clipping units are stepped during backward, in the background; accumulated gradients too."""
    model, plain = stack(policy_of(setting, tmp_path), depth=4), stack(None, depth=4)
    ours = offload_optimizer(torch.optim.AdamW, grouped(model), lr=1e-2)
    theirs = local_optimizer(torch.optim.AdamW, grouped(plain), lr=1e-2)
    fsdp2.step_in_backward(ours)
    for each, optimizer in ((model, ours), (plain, theirs)):
        train(each, optimizer, rank, range(3), clips=False, sync=False)
    assert_same(ours, theirs)


@on_ranks(4, 2)
@pytest.mark.parametrize("setting", ["all", "disk", "files"])
def test_empty_and_frozen_shards(rank: int, world_size: int, setting: str, tmp_path: Path) -> None:
    """Trailing ranks without a row, frozen weights, and some that get no gradient in a step."""
    results = []
    for policy in (policy_of(setting, tmp_path), None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8), nn.Linear(8, 8))
        model[2].weight.requires_grad_(False)
        options: dict[str, Any] = {} if policy is None else {"offload_policy": policy}
        for layer in model:
            fsdp2.fully_shard(layer, **options)
        fsdp2.fully_shard(model)
        optimizer = optimizer_for(model.parameters(), policy)
        for step in range(3):
            x = batch(step, rank)
            out = model[0](x) if step == 1 else model(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer)
    assert_same(*results)


RESUMED = [None, "all", "disk", "half in files", None, "files", "states", "states and gradients", "half", None]


@on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [*pairwise(RESUMED)])
def test_resume_across_settings(
    rank: int, world_size: int, saved: str | None, loaded: str | None, tmp_path: Path
) -> None:
    """A checkpoint right after a step continues the same training, also in an optimizer that has no state yet."""
    model, optimizer = stepped(policy_of(saved, tmp_path), rank, steps=2)
    checkpoint.save(tmp_path / "at", model=model, optimizer=optimizer)
    other, resumed = stepped(policy_of(loaded, tmp_path), rank, steps=0 if saved == "states and gradients" else 1)
    checkpoint.load(tmp_path / "at", model=other, optimizer=resumed)
    plain, reference = stepped(None, rank, steps=2)
    for each, optim in ((other, resumed), (plain, reference)):
        train(each, optim, rank, range(2, 4))
    assert_same(resumed, reference)


@on_ranks(2)
@pytest.mark.parametrize("setting", ["states", "disk", "files"])
def test_parameters_replaced_and_added(rank: int, world_size: int, setting: str, tmp_path: Path) -> None:
    """Shards that move to other memory, and groups that are added and changed (lost in DeepSpeed, issue 7905)."""
    results = []
    for policy in (policy_of(setting, tmp_path), None):
        model = stack(policy)
        optimizer = optimizer_for(model.inp.parameters(), policy)
        train(model, optimizer, rank, range(1))
        optimizer.add_param_group({"params": [*model.blocks.parameters()], "lr": 1e-3})
        train(model, optimizer, rank, range(1, 2))
        model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
        model.to(torch.float64).to(torch.float32)
        train(model, optimizer, rank, range(2, 4))
        results.append(optimizer)
    assert_same(*results)


@on_ranks(2)
def test_staged_state_takes_what_was_loaded(rank: int, world_size: int) -> None:
    """As after `load_state_dict`: a device that holds state in host memory went on with new state, silently."""
    weight = next(stack(None).parameters())
    outer = {"exp_avg": torch.ones_like(weight), "step": torch.tensor(3.0)}
    inner: dict[Any, dict[str, Any]] = {}
    staged = StagedState(inner, torch.device("cpu"), pins=False)
    assert staged.take(weight, outer)
    assert inner[weight]["step"] == 3 and torch.equal(local(inner[weight]["exp_avg"]), local(outer["exp_avg"]))
    assert local(inner[weight]["exp_avg"]).data_ptr() != local(outer["exp_avg"]).data_ptr()


@on_ranks(2)
def test_fraction(rank: int, world_size: int) -> None:
    """Of each unit the largest parameters that fit; the others are stepped as without offload."""
    model = stack(Offload(grads=True, params=True, fraction=0.5))
    unit: Any = fsdp2.fully_shard.state(model.blocks[0])
    offloaded = [param.fqn for param in unit.params if isinstance(param.plan.offload, Offload)]
    assert offloaded == ["up.weight", "norm.weight"]  # 160 bytes of 404, of which 202 may be offloaded


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    wrong = [{"states": False}, {"params": True}, {"fraction": 1.5}, {"threads": 0}, {"overlap": 1}, {"tier": []}]
    wrong += [{"tier": 3}, {"grads": True, "params": "files"}, {"grads": True, "params": "file", "tier": "/tmp"}]
    for options in (*wrong, {"params": "files", "tier": "/tmp"}):
        with pytest.raises(ArgumentError, match="Offload"):
            Offload(**options)
    with pytest.raises(ArgumentError, match=r"none of the .* is in a unit with an Offload policy"):
        offload_optimizer(torch.optim.AdamW, stack(None).parameters())
    with pytest.raises(ArgumentError, match=r"offload_optimizer: torch.optim.*Muon"):
        offload_optimizer(torch.optim.Muon, stack(Offload()).parameters())
    model = stack(Offload())
    counting = offload_optimizer(CountsInGroups, model.parameters(), lr=0.1, elementwise=True)
    for param in params_in(counting):
        param.grad = torch.zeros_like(param)
    counting.step()
    with pytest.raises(ArgumentError, match=r"CountsInGroups changes the options \['num_steps'\] of its param groups"):
        counting.wait()


class CountsInGroups(torch.optim.SGD):
    """As schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        super().step(closure)
