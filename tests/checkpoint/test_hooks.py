"""What runs on loading: hooks of modules and optimizers, and a `load_state_dict` of their own, as with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import ArgumentError, MismatchError, checkpoint
from tests.helpers.ranks import on_ranks


class Scaled(nn.Module):
    """Derives a buffer from its weight once it is loaded, in the way that `how` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.zeros(()), persistent=False)
        self.how = how
        if how == "post-hook":
            self.register_load_state_dict_post_hook(lambda module, keys: self.derive(module.weight))
        if how == "pre-hook":
            self.register_load_state_dict_pre_hook(self.before)

    def derive(self, weight: Any) -> None:
        self.scale.copy_(weight.detach().full_tensor().sum())

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.derive(state[prefix + "weight"])
        state.setdefault(prefix + "bias", torch.ones_like(self.bias.detach()))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state, prefix, *others)
        if self.how == "method":
            self.derive(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * self.scale + self.bias


def sharded(how: str) -> Any:
    model = nn.Sequential(Scaled(how), nn.BatchNorm1d(4))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["post-hook", "pre-hook", "method"])
def test_what_a_module_derives_when_it_is_loaded(rank: int, world_size: int, how: str, tmp_path: Path) -> None:
    """It derived from the random weights, silently. Loading by torch gives the same."""
    model, one, other = sharded(how), sharded(how), sharded(how)
    checkpoint.save(tmp_path / "a", model=model)
    checkpoint.load(tmp_path / "a", model=one)
    other.load_state_dict(model.state_dict())
    assert one[0].scale.ne(0) and torch.equal(one[0].scale, other[0].scale)
    for name, value in other.state_dict().items():
        here = one.state_dict()[name]
        assert torch.equal(*(each.full_tensor() if hasattr(each, "full_tensor") else each for each in (value, here)))


@on_ranks(2)
def test_a_pre_hook_that_adds_what_is_missing(rank: int, world_size: int, tmp_path: Path) -> None:
    """An older checkpoint has no bias: `strict=False` lets the hook decide, which sees that it is not there."""
    model, other = sharded("pre-hook"), sharded("pre-hook")
    checkpoint.save(tmp_path / "a", model={k: v for k, v in model.state_dict().items() if k != "0.bias"})
    loaded = checkpoint.load(tmp_path / "a", model=other, strict=False)
    assert loaded.missing == ["model '0.bias'"]
    assert other[0].bias.full_tensor().eq(1).all()
    assert torch.equal(other[0].weight.full_tensor(), model[0].weight.full_tensor())


@on_ranks(2)
def test_hooks_of_a_model_that_one_rank_reads(rank: int, world_size: int, tmp_path: Path) -> None:
    model, other = sharded("post-hook"), sharded("post-hook")
    checkpoint.save(tmp_path / "a", model=model)
    checkpoint.load_from_rank(tmp_path / "a", model=other)
    assert torch.equal(other[0].scale, model[0].weight.full_tensor().sum())


class Counting(torch.optim.AdamW):
    """Halves its rate with every step, by a counter that only its own state dict has."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / 2**self.steps
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer; what it adds to the state of a parameter is seen by its own state dict alone."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.slow, self.param_groups = base, dict[Any, Any](), base.param_groups

    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.slow.setdefault(param, param.detach().clone())
        self.base.step()
        for param, slow in self.slow.items():
            slow.lerp_(param.detach(), 0.5)
            param.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        content = self.base.state_dict()
        states = {number: {**each} for number, each in content["state"].items()}
        for number, slow in enumerate(self.slow.values()):
            states[number]["slow"] = slow
        return {**content, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        states = {number: {**each} for number, each in state_dict["state"].items()}
        self.slow = {params[number]: each.pop("slow") for number, each in states.items()}
        self.base.load_state_dict({**state_dict, "state": states})
        self.param_groups = self.base.param_groups


class Masters(torch.optim.SGD):
    """Keeps copies of the weights in a list."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [param.clone() for param in self.param_groups[0]["params"]]}


def with_hooks(params: Any) -> torch.optim.Optimizer:
    """Stores its rate as a text, by hooks."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def save(_: Any, content: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": str(group["lr"])} for group in content["param_groups"]]
        return {**content, "param_groups": groups, "by": "hook"}

    def load(_: Any, content: dict[str, Any]) -> dict[str, Any]:
        assert content.pop("by") == "hook"
        return {**content, "param_groups": [{**group, "lr": float(group["lr"])} for group in content["param_groups"]]}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    optimizer.register_load_state_dict_post_hook(lambda own: own.param_groups[0].update(momentum=0.5))
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "counter": lambda params: Counting(params),
    "wrapper": lambda params: Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "hooks": with_hooks,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    for step in range(steps):
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]


@on_ranks(2)
@pytest.mark.sampled
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_saves_and_loads_in_its_own_way(
    rank: int, world_size: int, name: str, several: bool, tmp_path: Path
) -> None:
    """What it adds is saved, and its own code loads it: training goes on as after torch's `load_state_dict`."""
    models = [fsdp2.fully_shard(nn.Linear(3, 4)) for _ in range(3)]
    saved, here, by_torch = (OPTIMIZERS[name](model.parameters()) for model in models)
    train(models[0], saved, 3)
    checkpoint.save(tmp_path / "a", model=models[0], optimizer=[saved] if several else saved)
    checkpoint.load(tmp_path / "a", model=models[1], optimizer=[here] if several else here)
    models[2].load_state_dict(models[0].state_dict())
    by_torch.load_state_dict(saved.state_dict())
    for one, other in zip(train(models[1], here, 3), train(models[2], by_torch, 3), strict=True):
        assert torch.equal(one, other)


def test_what_an_optimizer_adds_goes_nowhere_else(tmp_path: Path) -> None:
    """Another optimizer would lose the counter; and a checkpoint without one is not enough for the counter."""
    model = nn.Linear(3, 4)
    checkpoint.save(tmp_path / "a", model=model, optimizer=Counting(model.parameters(), lr=0.1))
    with pytest.raises(MismatchError, match="optimizer 'steps', for which AdamW has no place"):
        checkpoint.load(tmp_path / "a", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    checkpoint.save(tmp_path / "b", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(MismatchError, match="missing in the checkpoint: optimizer 'steps' of Counting"):
        checkpoint.load(tmp_path / "b", model=model, optimizer=Counting(model.parameters(), lr=0.1))


def test_tensors_that_an_optimizer_keeps_apart_are_refused(tmp_path: Path) -> None:
    """They were left out, silently."""
    model = nn.Linear(3, 4)
    with pytest.raises(ArgumentError, match=r"state_dict\(\) of Masters 'masters/0' is a tensor"):
        checkpoint.save(tmp_path / "a", model=model, optimizer=Masters(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD", "Adafactor", "ASGD", "RMSprop"])
def test_a_fresh_optimizer_of_a_model_in_another_dtype(kind: str, tmp_path: Path) -> None:
    """An fp32 run goes on in bf16: moments in the parameters' dtype as after torch's loader, counters as they are."""
    options: dict[str, Any] = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    models = [nn.Linear(3, 4), *(nn.Linear(3, 4).bfloat16() for _ in range(2))]
    saved, here, by_torch = (getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options) for model in models)
    models[0](torch.ones(2, 3)).sum().backward()
    saved.step()
    checkpoint.save(tmp_path / "a", model=models[0], optimizer=saved)
    checkpoint.load(tmp_path / "a", model=models[1], optimizer=here, cast=True)
    models[2].load_state_dict(models[0].state_dict())
    by_torch.load_state_dict(saved.state_dict())
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert here.state[one].keys() == by_torch.state[other].keys()
        for key, value in here.state[one].items():
            expected = by_torch.state[other][key] if value.ndim else saved.state[next(models[0].parameters())][key]
            assert value.dtype == expected.dtype, key
            assert value.ndim == 0 or torch.equal(value, expected), key
    for model, optimizer in ((models[1], here), (models[2], by_torch)):
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        optimizer.step()
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.allclose(one, other, rtol=0.02, atol=0.01)
