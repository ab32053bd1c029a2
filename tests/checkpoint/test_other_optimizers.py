"""State of an optimizer that is not the one which loads it, or that belongs to no parameter."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import ArgumentError, MismatchError, checkpoint, local_optimizer


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


@pytest.mark.parametrize("value", [0.0, torch.zeros(2), {"a": 1}], ids=repr)
def test_state_of_an_optimizer_that_belongs_to_no_parameter(value: Any, tmp_path: Path) -> None:
    """Zero was dropped without a word, and a tensor of two elements was asked whether it was true."""
    model, optimizer = stepped(torch.optim.SGD)
    optimizer.state["everybody"] = value  # type: ignore[index]
    with pytest.raises(ArgumentError, match="has state for 'everybody'"):
        checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
