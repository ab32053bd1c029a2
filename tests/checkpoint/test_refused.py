"""What cannot be saved is named, and nothing is written. Some of it was lost without a word, or ended in torch's
errors, or ended the process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import ArgumentError, checkpoint

ONES = torch.ones(2)


def with_optimizer(state: dict[Any, Any]) -> dict[str, Any]:
    """A model and its optimizer with this state; under "weight" it is the parameter's."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for key, value in state.items():
        optimizer.state[model.weight if key == "weight" else key] = value
    return {"model": model, "optimizer": optimizer}


def with_optimizers(make: Callable[[nn.Linear], Any]) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": make(model)}


def twice(model: nn.Linear) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), momentum=0.5), torch.optim.SGD([model.weight])]


class Counting(torch.optim.AdamW):
    """Keeps a counter that only its own state dict has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": 3}


def with_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_load_state_dict_post_hook(lambda own: own.param_groups[0].update(momentum=0.5))
    return optimizer


def named(name: str) -> nn.Module:
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(ONES))
    return model


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


BAD_NAMES = ["__metadata__", "half \ud800", "\udfff"]
GRAPH = r"extra 'sampler' at 'graph/0': .* dense tensors"
OWN = r"has a state_dict or load_state_dict of its own.* rest in extra="
STEP = "expected the number of steps done"

REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an object": (lambda: {"model": {"layers.odd": object()}}, r"layers\.odd"),
    "a number for a model": (lambda: {"model": 3}, "3"),
    "sparse": (lambda: {"model": {"s": torch.eye(3).to_sparse()}}, "sparse"),
    "meta": (lambda: {"model": nn.Linear(2, 2, device="meta")}, "weight"),
    "CSR in extra": (lambda: {"extra": {"sampler": {"graph": [torch.eye(3).to_sparse_csr()]}}}, GRAPH),
    "meta in extra": (lambda: {"extra": {"sampler": {"graph": [torch.ones(3, device="meta")]}}}, GRAPH),
    "nested": (lambda: {"model": {"lengths": nested()}}, r"'lengths'.* a nested "),
    # It has no memory of its own: reading it ended the process.
    "a wrapper": (
        lambda: with_optimizer({"weight": {"momentum_buffer": TwoTensor(torch.ones(3, 3), torch.ones(3, 3))}}),
        r"'momentum_buffer\.weight': a TwoTensor",
    ),
    "a state dict in a dict": (
        lambda: {"model": {"model": nn.Linear(3, 2).state_dict()}},
        r"has a tensor inside, at 'weight'.* Flatten the dict",
    ),
    # Each of these was one.
    "keys 1 and '1'": (lambda: {"extra": {1: "a", "1": "b"}}, "keys that are strings, got 1"),
    "two under one name": (
        lambda: {"extra": {"a/b": {"c": ONES}, "a": {"b": {"c": ONES}}}},
        "two tensors would be stored under this name",
    ),
    **{f"{name!a}": (lambda name=name: {"model": {name: ONES}}, "rename") for name in BAD_NAMES},
    **{f"{name!a} of a module": (lambda name=name: {"model": named(name)}, "rename") for name in BAD_NAMES},
    **{f"{name!a} in extra": (lambda name=name: {"extra": {name: ONES}}, "rename") for name in BAD_NAMES[1:]},
    **{f"step {step!r}": (lambda step=step: {"model": {"w": ONES}, "step": step}, STEP) for step in (True, 2.0, "2")},
    "an optimizer without its model": (lambda: {"optimizer": with_optimizer({})["optimizer"]}, "model"),
    "3 for an optimizer": (lambda: with_optimizers(lambda model: [twice(model)[1], 3]), "got 3 under the name '1'"),
    "a tensor for one": (lambda: with_optimizers(lambda model: {"a": twice(model)[1], "b": ONES}), "the name 'b'"),
    "one parameter in two": (lambda: with_optimizers(twice), "'weight' is a parameter of '0' and of '1'"),
    "a parameter of nobody": (
        lambda: with_optimizers(lambda model: torch.optim.AdamW([*model.parameters(), nn.Parameter(ONES)])),
        r"(?i)param",
    ),
    "a tensor of nobody": (lambda: with_optimizer({"everybody": ONES}), "has state for 'everybody'"),
    # What they add would be lost.
    "its own state_dict": (lambda: with_optimizers(lambda model: Counting(model.parameters())), OWN),
    "its own loader": (lambda: with_optimizers(lambda model: with_hook(model.parameters())), OWN),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved(what: str, tmp_path: Path) -> None:
    make, message = REFUSED[what]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR and nested tensors beta
        with pytest.raises(ArgumentError, match=message):
            checkpoint.save(tmp_path / "a", **make())
    assert not any(tmp_path.iterdir())


def test_an_optimizer_that_loads_in_its_own_way(tmp_path: Path) -> None:
    given = with_optimizers(lambda model: torch.optim.SGD(model.parameters()))
    checkpoint.save(tmp_path / "a", **given)
    for make in (Counting, with_hook):
        with pytest.raises(ArgumentError, match=r"has a state_dict or load_state_dict of its own"):
            checkpoint.load(tmp_path / "a", model=given["model"], optimizer=make(given["model"].parameters()))
