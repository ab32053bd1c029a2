"""Bugs in what of a model, an optimizer and a user goes into a checkpoint and comes back, found by a second review."""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import ArgumentError, CheckpointError, MismatchError, checkpoint, fully_shard, local_optimizer
from fsdp2.checkpoint import RandomState, scattering
from fsdp2.checkpoint.tools.cli import main
from tests.helpers.ranks import on_ranks


class Counting(nn.Module):
    """Its extra state is a tensor, and may grow."""

    def __init__(self, *counts: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.counts = torch.tensor(counts)

    def get_extra_state(self) -> Tensor:
        return self.counts.double()

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = state.float()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Head(nn.Module):
    """Two weights, or one with two names, in either order."""

    def __init__(self, tied: bool, reverse: bool = False) -> None:
        super().__init__()
        made = {"embedding": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)}
        for name in sorted(made, reverse=reverse):
            setattr(self, name, made[name])
        if tied:
            self.out.weight = self.embedding.weight


class Halved(nn.Module):
    """What it stores is made for the state dict."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "half"] = self.weight.detach() / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if prefix + "half" in state_dict:
            self.weight.data.copy_(state_dict[prefix + "half"] * 2)


@on_ranks(2)
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("before", [(0.0, 0.0, 0.0), (7.0,)], ids=["same_shape", "another_shape"])
def test_an_extra_state_that_is_a_tensor(
    rank: int, world_size: int, before: tuple[float, ...], consolidated: bool, tmp_path: Path
) -> None:
    """It was read into a tensor that nobody looked at again."""
    model = nn.Sequential(fully_shard(Counting(1.0, 2.0, 3.0)), Halved(4.0).requires_grad_(False))
    checkpoint.save(tmp_path / "a", model=model, consolidated=consolidated)
    other: Any = nn.Sequential(fully_shard(Counting(*before)), Halved(0.0))
    checkpoint.load(tmp_path / "a", model=other)
    assert torch.equal(other[0].counts, torch.tensor([1.0, 2.0, 3.0]))
    assert other[1].weight.eq(4).all()


def test_an_extra_state_of_a_model_that_has_no_memory_yet(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=Counting(1.0, 2.0))
    with torch.device("meta"):
        other = Counting(0.0)
    checkpoint.load(tmp_path / "a", model=other)
    assert torch.equal(other.counts, torch.tensor([1.0, 2.0])) and not other.weight.is_meta


def test_wrapper_tensors_where_they_cannot_be_stored(tmp_path: Path) -> None:
    """They have no memory of their own: reading it ended the process."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pair = TwoTensor(torch.ones(3, 3), torch.ones(3, 3))
    optimizer.state[model.weight]["momentum_buffer"] = pair
    with pytest.raises(ArgumentError, match=r"'momentum_buffer\.weight': a TwoTensor"):
        checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    with pytest.raises(ArgumentError, match="'value/inner': a TwoTensor"):
        checkpoint.save(tmp_path / "b", model={"value": {"inner": pair}})
    with pytest.raises(ArgumentError, match=r"'value/inner': .* dense tensors"):
        checkpoint.save(tmp_path / "c", model={"value": {"inner": torch.eye(3).to_sparse()}})


def stepped(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


FAMILY: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "decoupled": partial(torch.optim.Adam, decoupled_weight_decay=True),
    "AdamW": torch.optim.AdamW,
    "local": partial(local_optimizer, torch.optim.AdamW),
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}
ALIKE = [{"SGD", "momentum"}, {"AdamW", "local", "decoupled"}, {"Adam", "decoupled"}]


@pytest.mark.parametrize("saved", FAMILY)
def test_the_state_of_another_optimizer(saved: str, tmp_path: Path) -> None:
    """It was accepted: with a warning and a KeyError in the next step if the optimizer was new, as after every restart,
    and without either where the other one (SGD) needs nothing. It is a mismatch, with ``strict=False`` too: what has
    the same parts and goes by the same rule is no other optimizer."""
    model, optimizer = stepped(FAMILY[saved])
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    for name, make in FAMILY.items():
        for target in (make(nn.Linear(3, 3).parameters(), lr=0.1), stepped(make)[1]):
            owner = nn.Linear(3, 3)
            owner.weight, owner.bias = target.param_groups[0]["params"]
            if name == saved or any({name, saved} <= alike for alike in ALIKE):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    checkpoint.load(tmp_path / "a", model=owner, optimizer=target)
                for param in owner.parameters():
                    param.grad = torch.ones_like(param)
                target.step()
            else:
                with pytest.raises(
                    MismatchError, match=f"optimizer state of .*this is {type(target).__name__.removeprefix('Local')}"
                ):
                    checkpoint.load(tmp_path / "a", model=owner, optimizer=target, strict=False)
    kind = checkpoint.describe(tmp_path / "a").optimizer
    assert kind == {"momentum": "SGD", "decoupled": "Adam", "local": "AdamW"}.get(saved, saved)


class Lion(torch.optim.Optimizer):
    """Of another library: which parts its state has shows at the first step."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param -= group["lr"] * state["momentum"].sign()


class Tiger(Lion):
    """A subclass may use what its base saved."""


class Panther(torch.optim.Optimizer):
    """The same options as Lion, and what else, nobody knows before a step."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})


def test_the_state_of_an_optimizer_of_another_library(tmp_path: Path) -> None:
    model, optimizer = stepped(Lion)
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a", model=model, optimizer=Tiger(model.parameters()))
    with pytest.warns(UserWarning, match=r"saved by Lion is given to Panther.*momentum"):
        checkpoint.load(tmp_path / "a", model=model, optimizer=Panther(model.parameters()))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(MismatchError, match="optimizer state of Lion"):
            checkpoint.load(tmp_path / "a", model=model, optimizer=kind(model.parameters()))


def test_the_state_of_another_optimizer_in_a_folder_of_torch(tmp_path: Path) -> None:
    """DCP does not say which optimizer it was. What torch's keep is known."""
    model, optimizer = stepped(torch.optim.SGD, momentum=0.9)
    names = ("model", "optimizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has some about one process
        dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path / "a")
    checkpoint.load(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    with pytest.raises(MismatchError, match="this is AdamW: the saved one keeps momentum_buffer"):
        checkpoint.load(tmp_path / "a", model=model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("value", [0.0, torch.zeros(2), {"a": 1}], ids=repr)
def test_state_of_an_optimizer_that_belongs_to_no_parameter(value: Any, tmp_path: Path) -> None:
    """Zero was dropped without a word, and a tensor of two elements was asked whether it was true."""
    model, optimizer = stepped(torch.optim.SGD)
    optimizer.state["everybody"] = value  # type: ignore[index]
    with pytest.raises(ArgumentError, match="has state for 'everybody'"):
        checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)


def test_how_deep_values_may_be_nested(tmp_path: Path) -> None:
    """Keys that are no strings take three levels of JSON, not two: what was saved could not be read."""

    def nested(depth: int) -> Any:
        return {0: nested(depth - 1)} if depth else "end"

    checkpoint.save(tmp_path / "a", extra={"deep": nested(30)})
    assert checkpoint.load(tmp_path / "a").extra["deep"] == nested(30)
    with pytest.raises(CheckpointError, match=r"nothing is saved.*nested more than 100 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": nested(38)})
    with pytest.raises(ArgumentError, match="nested more than 40 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": nested(42)})


def test_keys_of_extra_are_strings(tmp_path: Path) -> None:
    """1 and "1" were one."""
    with pytest.raises(ArgumentError, match="keys that are strings, got 1"):
        checkpoint.save(tmp_path / "a", extra={1: "a", "1": "b"})  # type: ignore[dict-item]


def test_random_state_that_not_all_ranks_gave() -> None:
    """A rank that gave none was asked for its generators."""
    drawn = []
    for rank in range(3):
        with pytest.warns(UserWarning, match="seeds its generators anew"):
            RandomState().load_resharded([RandomState().state_dict(), None], rank, 3)
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 3


@on_ranks(2)
def test_a_reader_that_cannot_list_what_there_is(rank: int, world_size: int, tmp_path: Path) -> None:
    """Formats that read lazily fail there, and the other ranks waited for the group's timeout."""

    def failing(catalog: Any) -> bytes:
        raise OSError(5, "the disk is gone")

    checkpoint.save(tmp_path / "a", model={"w": torch.ones(2)})
    listing, start = scattering._listing, time.monotonic()
    scattering._listing = failing  # in this process only
    try:
        with pytest.raises((OSError, CheckpointError), match="the disk is gone"):
            checkpoint.load_from_rank(tmp_path / "a", model={"w": torch.zeros(2)})
    finally:
        scattering._listing = listing
    assert time.monotonic() - start < 10
    checkpoint.load_from_rank(tmp_path / "a", model={"w": torch.zeros(2)})


def test_twins_that_differ_leave_a_model_without_memory_as_it_is(tmp_path: Path) -> None:
    """It had memory already, with no values, when the error said that it does not fit."""

    checkpoint.save(tmp_path / "a", model=Head(tied=False))
    with torch.device("meta"):
        other = Head(tied=True)
    with pytest.raises(MismatchError, match="are stored apart with different values"):
        checkpoint.load(tmp_path / "a", model=other)
    assert other.embedding.weight.is_meta


def test_what_only_one_format_can_hold_differs(tmp_path: Path) -> None:
    """`diff` of a checkpoint and its conversion, which lacks the extra state, said that they were equal."""
    checkpoint.save(tmp_path / "a", model={"w": torch.ones(2)}, extra={"loader": {"at": 3}})
    checkpoint.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert checkpoint.diff(tmp_path / "a", tmp_path / "b").other == ["extra state: only in the first"]
    assert checkpoint.diff(tmp_path / "b", tmp_path / "a").other == ["extra state: only in the second"]
    assert checkpoint.diff(tmp_path / "a", tmp_path / "b", model_only=True).equal


@pytest.mark.parametrize("size", ["inf", "nan", "1e999GB"])
def test_sizes_that_are_none(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path), str(tmp_path / "b"), "--max-file-size", size])
    assert ended.value.code == 2 and "is not a size" in capsys.readouterr().err


def test_the_optimizer_of_a_weight_whose_names_come_in_another_order(tmp_path: Path) -> None:
    """Its state was called missing under the one name, and unexpected under the other."""
    models = [Head(tied=True), Head(tied=True, reverse=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        assert isinstance(model.embedding, nn.Embedding)
        model.embedding.weight.grad = torch.full((4, 3), 1.0 + number)
        optimizer.step()
    checkpoint.save(tmp_path / "a", model=models[0], optimizer=optimizers[0])
    checkpoint.load(tmp_path / "a", model=models[1], optimizer=optimizers[1])
    assert [state["momentum_buffer"].unique().item() for state in optimizers[1].state.values()] == [1.0]


def test_steps_of_other_kinds(tmp_path: Path) -> None:
    """NumPy's failed after all had been written, and True made a checkpoint that could not be read."""
    checkpoint.save(tmp_path, model={"w": torch.ones(2)}, step=np.int64(3))  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path / "step-00000003", model={"w": torch.zeros(2)}).step == 3
    for step in (True, 2.0, "2"):
        with pytest.raises(ArgumentError, match="expected the number of steps done"):
            checkpoint.save(tmp_path, model={"w": torch.ones(2)}, step=step)  # type: ignore[arg-type]


def test_prune_deletes_a_link_and_not_what_is_behind_it(tmp_path: Path) -> None:
    """The manifest of a checkpoint elsewhere was deleted."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "elsewhere", model={"w": torch.full((2,), float(step))}, step=step)
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        name = f"step-0000000{step}"
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere" / name)
    checkpoint.prune(tmp_path / "run", keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    assert len(checkpoint.checkpoints(tmp_path / "elsewhere")) == 2
