"""Optimizer state by FQN: every optimizer of torch, across worlds; param groups that differ; state that is nested."""

import collections
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2.checkpoint as fc
from fsdp2 import local_optimizer
from fsdp2.errors import ArgumentError, CheckpointError, MismatchError
from tests.helpers.checkpoint_cases import assert_bits, shard, spoil
from tests.helpers.parity_models import Stack, batch, full, local, shard_like
from tests.helpers.ranks import on_ranks, run_on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def local_adamw(params: Any) -> torch.optim.Optimizer:
    return local_optimizer(torch.optim.AdamW, params, lr=0.01, amsgrad=True)


def local_rprop(params: Any) -> torch.optim.Optimizer:
    """Torch's own does not run on DTensors."""
    return local_optimizer(torch.optim.Rprop, params)


class Master(torch.optim.Optimizer):
    """SGD with a copy in fp32, and other state than tensors of the parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, torch.tensor(0.5)), "rule": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().float()
                    state["history"] = []
                    state["more"] = {"norms": (torch.tensor(0.5), 2), 3: "three", "ema": torch.zeros_like(param)}
                    state["num_steps"] = 0
                state["num_steps"] += 1
                state["master"] -= group["lr"] * param.grad.float()
                state["history"].append(torch.full_like(param, float(state["num_steps"])))
                state["more"]["ema"] += 0.5 * param.grad
                param.copy_(state["master"].to(param.dtype))


OPTIMIZERS: dict[str, Make] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.25),
    "asgd": functools.partial(torch.optim.ASGD),
    "nadam": functools.partial(torch.optim.NAdam),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "rprop": local_rprop,
    "adafactor": functools.partial(torch.optim.Adafactor),
    "local": local_adamw,
    "master": Master,
}


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(Stack(dim=6, hidden=5, depth=2), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> list[Tensor]:
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        loss = model(batch(step, rank, 6, dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(value: Any) -> Any:
    """The same with whole tensors (collective)."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    return full(value).detach().clone() if isinstance(value, Tensor) else value


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """FQN -> state, in whole tensors."""
    return {name: whole(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def assert_same(where: str, got: Any, expected: Any) -> None:
    """The same types and values; of a DTensor, this rank's part."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert_bits(where, got, shard_like(expected, got))
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, item in expected.items():
            assert_same(f"{where}.{key}", got[key], item)
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected), where
        assert len(got) == len(expected), where
        for index, item in enumerate(expected):
            assert_same(f"{where}.{index}", got[index], item)
    else:
        assert type(got) is type(expected), where
        assert got == expected, where


def save_trained(rank: int, world_size: int, folder: str, name: str, form: dict[str, Any]) -> Any:
    model = build()
    try:
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, rank, 0, 1)
    except (NotImplementedError, RuntimeError) as error:
        if name == "adafactor":
            pytest.skip(f"torch's {name} does not run on DTensors: {error}")
        raise
    fc.save(folder, model=model, optimizer=optimizer, **form)
    options = [{k: whole(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return whole_state(model, optimizer), options


def load_and_train(
    rank: int, world_size: int, folder: str, name: str, state: dict[str, Any], options: list[Any]
) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    fc.load(folder, model=model, optimizer=optimizer)
    params = dict(model.named_parameters())
    assert len(optimizer.state) == len(state) == (0 if name == "sgd" else len(params))
    for fqn, expected in state.items():
        assert_same(fqn, optimizer.state[params[fqn]], expected)
        for key, value in optimizer.state[params[fqn]].items():
            if isinstance(value, Tensor) and value.shape == params[fqn].shape:
                assert isinstance(value, DTensor), (fqn, key)
                assert value.placements == params[fqn].placements, (fqn, key)
    got = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert_same("groups", got, options)
    train(model, optimizer, rank, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_to_another_world(name: str, tmp_path: Path) -> None:
    """All state and options come back into an optimizer that has made no step, on more and on fewer ranks."""
    folder = str(tmp_path / "a")
    consolidated = len(name) % 2 == 0
    state, options = run_on_ranks(save_trained, 2, folder=folder, name=name, form={"consolidated": consolidated})[0]
    for world_size in (3, 1):
        run_on_ranks(load_and_train, world_size, folder=folder, name=name, state=state, options=options)


@on_ranks(1, 2)
def test_values_that_are_equal_and_not_the_same(rank: int, world_size: int, tmp_path: Path) -> None:
    """States were merged if Python called them equal, so that of 1, 1.0 and True each became the first."""
    values = [1, 1.0, True, 0.0, -0.0, False, math.nan, collections.Counter(a=1), {"a": 1}]
    params = nn.ParameterDict({f"p{index}": nn.Parameter(torch.ones(2)) for index in range(len(values))})
    optimizer = torch.optim.SGD(
        [{"params": [param], "nesterov": value} for param, value in zip(params.values(), values, strict=True)]
    )
    for param, value in zip(params.values(), values, strict=True):
        optimizer.state[param] = {"value": value}
    fc.save(tmp_path / "a", model=params, optimizer=optimizer)
    again = torch.optim.SGD([{"params": [param]} for param in params.values()])
    fc.load(tmp_path / "a", model=params, optimizer=again)
    assert [repr(again.state[param]["value"]) for param in params.values()] == [*map(repr, values)]
    assert [repr(group["nesterov"]) for group in again.param_groups] == [*map(repr, values)]


# --- param groups -----------------------------------------------------------------------------------------------------


def two_groups(model: nn.Module, *, swapped: bool = False) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.01)


def options_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """FQN -> what its group says of learning rate and decay."""
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def one_each(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [param]} for param in reversed(list(model.parameters()))], lr=7.0)


@on_ranks(2)
@pytest.mark.parametrize("how", ["swapped", "one_each", "named"])
def test_groups_in_another_order_or_split(rank: int, world_size: int, how: str, tmp_path: Path) -> None:
    """State and options follow the names."""
    model = build()
    optimizer = two_groups(model)
    train(model, optimizer, rank, 0, 1)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = build()
    if how == "swapped":
        other_optimizer = two_groups(other, swapped=True)
        for group in other_optimizer.param_groups:
            group["lr"] = 7.0
    elif how == "one_each":
        other_optimizer = one_each(other)
    else:
        named = list(other.named_parameters())
        groups = [[pair for pair in named if (pair[1].ndim == 2) is big] for big in (True, False)]
        other_optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=7.0)
    fc.load(tmp_path / "a", model=other, optimizer=other_optimizer)
    assert options_by_name(other, other_optimizer) == options_by_name(model, optimizer)
    expected = whole_state(model, optimizer)
    for name, param in other.named_parameters():
        assert_same(name, other_optimizer.state[param], expected[name])
    assert torch.equal(train(model, optimizer, rank, 2)[0], train(other, other_optimizer, rank, 2)[0])
    if how == "named":
        assert other_optimizer.param_groups[0]["param_names"] == [name for name, _ in groups[0]]


@on_ranks(2)
def test_groups_that_become_one(rank: int, world_size: int, tmp_path: Path) -> None:
    """Fine if their options are alike; there is no right answer if they are not."""
    model = build()
    for name, optimizer in [("alike", one_each(model)), ("unlike", two_groups(model))]:
        fc.save(tmp_path / name, model=model, optimizer=optimizer)
    other = build()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    fc.load(tmp_path / "alike", model=other, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 7.0
    with pytest.raises(MismatchError, match=r"lr|weight_decay"):
        fc.load(tmp_path / "unlike", model=other, optimizer=optimizer)


@on_ranks(2)
def test_a_learning_rate_that_is_a_tensor(rank: int, world_size: int, tmp_path: Path) -> None:
    """It stays the tensor that others hold."""
    model = build()
    saved, here = (torch.optim.AdamW(model.parameters(), lr=torch.tensor(rate), foreach=False) for rate in (0.5, 0.1))
    fc.save(tmp_path / "a", model=model, optimizer=saved)
    held = here.param_groups[0]["lr"]
    fc.load(tmp_path / "a", model=model, optimizer=here)
    assert here.param_groups[0]["lr"] is held and held == 0.5


@on_ranks(2)
def test_options_of_a_group_without_parameters(rank: int, world_size: int, tmp_path: Path) -> None:
    """A group whose parameters are not unfrozen yet has a learning rate too, and a schedule that set it."""
    model = build()

    def make(model: nn.Module, *rates: float, first: bool = True) -> torch.optim.Optimizer:
        params = list(model.parameters())
        groups = [{"params": params if (index == 0) is first else [], "lr": lr} for index, lr in enumerate(rates)]
        return torch.optim.AdamW(groups)

    optimizer = make(model, 0.01, 0.25)
    train(model, optimizer, rank, 0)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = build()
    again = make(other, 7.0, 7.0)
    fc.load(tmp_path / "a", model=other, optimizer=again)
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.25]


# --- parts ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_never_stepped(rank: int, world_size: int, tmp_path: Path) -> None:
    """No state is saved; loading it leaves no state behind; the first step after it is a first step."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer)
    expected = train(model, optimizer, rank, 0, 1)
    for steps in ((), (5, 6)):
        other = build()
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
        train(other, other_optimizer, rank, *steps)
        fc.load(tmp_path / "a", model=other, optimizer=other_optimizer)
        assert torch.equal(torch.stack(train(other, other_optimizer, rank, 0, 1)), torch.stack(expected))


@on_ranks(2)
def test_one_without_the_other(rank: int, world_size: int, tmp_path: Path) -> None:
    """The model alone from a checkpoint of both; an optimizer that was not saved is missed."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 0)
    fc.save(tmp_path / "both", model=model, optimizer=optimizer)
    fc.save(tmp_path / "model", model=model)
    other = build()
    for param in other.parameters():
        spoil(param)
    loaded = fc.load(tmp_path / "both", model=other)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    for (fqn, param), source in zip(other.named_parameters(), model.parameters(), strict=True):
        assert_bits(fqn, param, source)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    with pytest.raises(CheckpointError, match="optimizer"):
        fc.load(tmp_path / "model", model=other, optimizer=other_optimizer)
    with pytest.raises(ArgumentError, match="model"):
        fc.load(tmp_path / "both", optimizer=other_optimizer)


@on_ranks(2)
def test_state_of_a_parameter_that_is_new(rank: int, world_size: int, tmp_path: Path) -> None:
    """A parameter that the saved optimizer did not have is reported, or starts anew with ``strict=False``."""
    model = build()
    optimizer = torch.optim.SGD([model.inp.weight, model.out.weight], lr=0.1, momentum=0.5)
    train(model, optimizer, rank, 0)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = build()
    more = torch.optim.SGD([other.inp.weight, other.out.weight, other.out.bias], lr=0.1, momentum=0.5)
    with pytest.raises(MismatchError, match=r"out\.bias"):
        fc.load(tmp_path / "a", model=other, optimizer=more)
    fc.load(tmp_path / "a", model=other, optimizer=more, strict=False)
    assert_bits(
        "momentum",
        more.state[other.inp.weight]["momentum_buffer"],
        optimizer.state[model.inp.weight]["momentum_buffer"],
    )
    assert local(more.state[other.out.bias].get("momentum_buffer", torch.zeros(1))).count_nonzero() == 0
    fewer = torch.optim.SGD([other.inp.weight], lr=0.1, momentum=0.5)
    with pytest.raises(MismatchError, match=r"out\.weight"):
        fc.load(tmp_path / "a", model=other, optimizer=fewer)
