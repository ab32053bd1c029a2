"""Every learning rate scheduler of torch: saved in the middle of its schedule, resumed, and the same steps after."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from fsdp2 import checkpoint


class Halving:
    """A rule that is an object, whose attributes are a part of the state."""

    def __init__(self) -> None:
        self.factor = 0.5

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


def sequential(optimizer: Any) -> Any:
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.MultiStepLR(optimizer, [2, 2, 5])], milestones=[5])


def chained(optimizer: Any) -> Any:
    both = [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.MultiStepLR(optimizer, [5, 6])]
    return schedulers.ChainedScheduler(both, optimizer)


MAKE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, [lambda epoch: 0.9**epoch, Halving()]),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, Halving()),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5]),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, 0.5, 6),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 0.1, total_iters=7),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 8),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1, cooldown=1),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.2, 3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.4, total_steps=12),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 9, 2.0),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=6),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}], 0.1, momentum=0.9)
    return model, optimizer, MAKE[name](optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> list[Any]:
    model(torch.full((2, 3), 0.1 * number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    # The loss of a validation, as a program may have it: a number of NumPy, which the scheduler keeps.
    plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR calls what it consists of with an epoch
        scheduler.step(*([np.float64(1 + number // 2)] if plateau else []))
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def test_there_is_none_that_is_not_tested() -> None:
    assert {*schedulers.__all__} - {"LRScheduler"} <= MAKE.keys()


@pytest.mark.parametrize("name", MAKE)
def test_a_schedule_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    """`MultiStepLR` keeps its milestones in a Counter. It came back as a dict, and within a `SequentialLR` (a warm-up
    before it) the next step died on ``dict.elements``."""
    model, optimizer, scheduler = build(name)
    for number in range(4):
        step(model, optimizer, scheduler, number)
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer, extra={"scheduler": scheduler})
    its = build(name)
    checkpoint.load(tmp_path / "a", model=its[0], optimizer=its[1], extra={"scheduler": its[2]})
    for number in range(4, 9):
        expected = step(model, optimizer, scheduler, number)
        assert step(*its, number) == expected
    assert str(its[2].state_dict()) == str(scheduler.state_dict())
