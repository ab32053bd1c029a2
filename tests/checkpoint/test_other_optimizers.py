"""Several optimizers and models in one checkpoint; state of an optimizer that is not the one which loads it."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import MismatchError, checkpoint, fully_shard, local_optimizer
from tests.helpers.ranks import on_ranks


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
}


ALIKE = [{"SGD", "momentum"}, {"AdamW", "local"}, {"Adam", "decoupled"}]


@pytest.mark.parametrize("saved", FAMILY)
def test_the_state_of_another_optimizer(saved: str, tmp_path: Path) -> None:
    """It was accepted: with a warning and a KeyError in the next step if the optimizer was new, as after every restart,
    and without either where the other one (SGD) needs nothing. It is a mismatch, with ``strict=False`` too."""
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


class Lion(torch.optim.SGD):
    """Of another library: its name is not known."""


class Tiger(Lion):
    """A subclass may use what its base saved."""


def test_the_state_of_an_optimizer_of_another_library(tmp_path: Path) -> None:
    model, optimizer = stepped(Lion, momentum=0.9)
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a", model=model, optimizer=Tiger(model.parameters(), lr=0.1))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(MismatchError, match="optimizer state of Lion"):
            checkpoint.load(tmp_path / "a", model=model, optimizer=kind(model.parameters()))


# --- several ----------------------------------------------------------------------------------------------------------


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))


def two(model: nn.Module, lr: float = 0.1) -> list[torch.optim.Optimizer]:
    """One for matrices, another for the rest, as with Muon."""
    params = list(model.parameters())
    return [
        torch.optim.SGD([param for param in params if param.ndim == 2], lr=lr, momentum=0.9),
        torch.optim.AdamW([param for param in params if param.ndim != 2], lr=lr),
    ]


def step(model: nn.Module, optimizers: Any, number: int) -> torch.Tensor:
    loss = model(torch.full((2, 4), 0.1 * number)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@on_ranks(2)
@pytest.mark.parametrize("named", [False, True])
def test_two_optimizers_of_one_model(rank: int, world_size: int, named: bool, tmp_path: Path) -> None:
    """Muon for the matrices and AdamW for the rest, saved together."""

    def form(optimizers: list[torch.optim.Optimizer]) -> Any:
        return dict(zip(("muon", "adamw"), optimizers, strict=True)) if named else optimizers

    model = network(0)
    optimizers = two(model)
    for number in range(3):
        step(model, optimizers, number)
    checkpoint.save(tmp_path / "a", model=model, optimizer=form(optimizers))
    other = network(1)
    its = two(other, lr=7.0)
    checkpoint.load(tmp_path / "a", model=other, optimizer=form(its))
    assert [optimizer.param_groups[0]["lr"] for optimizer in its] == [0.1, 0.1]
    for number in range(3, 6):
        assert torch.equal(step(model, optimizers, number), step(other, its, number))
    assert checkpoint.describe(tmp_path / "a").optimizer == "SGD, AdamW"
    with pytest.raises(MismatchError, match=r"state of AdamW, and this is SGD|state of 'param"):
        checkpoint.load(tmp_path / "a", model=other, optimizer=form(its[::-1]))
    if named:
        with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: optimizer state of '0\.bias'"):
            checkpoint.load(tmp_path / "a", model=other, optimizer={"muon": its[0]})


@on_ranks(2)
def test_one_optimizer_that_became_two(rank: int, world_size: int, tmp_path: Path) -> None:
    """What one AdamW saved goes to two of them by the names of parameters. Of one that was forgotten, the state was
    dropped without a word."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, [optimizer], 0)
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = network(1)
    params = list(other.parameters())
    its = [torch.optim.AdamW(params[:2]), torch.optim.AdamW(params[2:])]
    checkpoint.load(tmp_path / "a", model=other, optimizer=its)
    fewer = [torch.optim.AdamW(params[:2]), torch.optim.AdamW(params[2:3])]
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: optimizer state of '2\.bias'"):
        checkpoint.load(tmp_path / "a", model=other, optimizer=fewer)
    loaded = checkpoint.load(tmp_path / "a", model=other, optimizer=fewer, strict=False)
    assert loaded.unexpected == ["optimizer state of '2.bias'"]
    for number in range(1, 4):
        assert torch.equal(step(model, [optimizer], number), step(other, its, number))
