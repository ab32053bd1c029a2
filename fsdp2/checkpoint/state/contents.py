"""What an optimizer holds, and how to give it back. Layer: checkpoint.

Most optimizers keep everything in `state` and `param_groups`. One with a `state_dict` or a `load_state_dict` of its own
(a wrapper, master weights kept apart), or with hooks on these, is asked for its state dict, and loads it by itself. It
must have torch's form: ``{"state": {number: ...}, "param_groups": [...], **added}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp2._torch.checkpoint import state_hooks
from fsdp2.errors import ArgumentError

__all__ = ["Contents", "contents_of", "load_by_itself", "loads_by_itself"]

BASE = torch.optim.Optimizer


class Contents(NamedTuple):
    """What an optimizer holds."""

    states: Mapping[Any, Any]  # by parameter; what is kept for nothing in particular has another key
    groups: Sequence[Mapping[str, Any]]  # the options of each param group
    added: Mapping[str, Any]  # what its own state dict has besides, by key


def loads_by_itself(optimizer: BASE) -> bool:
    """Whether the optimizer's `state_dict` or `load_state_dict` do more than torch's. (Those of fsdp2 only keep dtypes
    and places, and so does a checkpoint.)"""
    methods = [(type(optimizer).state_dict, BASE.state_dict), (type(optimizer).load_state_dict, BASE.load_state_dict)]
    other = [own for own, base in methods if own is not base and not own.__module__.startswith("fsdp2.")]
    return bool(other or state_hooks(optimizer))


def contents_of(optimizer: BASE) -> Contents:
    """What it holds now; its own tensors, not copies.

    Raises:
        ArgumentError: its state dict does not have torch's form.
    """
    if not loads_by_itself(optimizer):
        return Contents(optimizer.state, optimizer.param_groups, {})
    content = optimizer.state_dict()
    params = {number: param for param, number in _numbers(optimizer, content).items()}
    states = {params.get(key, key): state for key, state in content["state"].items()}
    added = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
    return Contents(states, content["param_groups"], added)


def load_by_itself(
    optimizer: BASE,
    states: Mapping[Any, Any],
    options: Sequence[Mapping[str, Any]],
    added: Mapping[str, Any],
) -> None:
    """Let the optimizer load these, and keep the options and additions that are not among them."""
    content = optimizer.state_dict()
    numbers = _numbers(optimizer, content)
    groups = [{**group, **given} for group, given in zip(content["param_groups"], options, strict=True)]
    state = {numbers.get(key, key): each for key, each in states.items()}
    optimizer.load_state_dict({**content, **added, "state": state, "param_groups": groups})


def _numbers(optimizer: BASE, content: Any) -> dict[torch.Tensor, Any]:
    """The number of each parameter in a state dict."""
    try:
        dict(content["state"])
        pairs = zip(content["param_groups"], optimizer.param_groups, strict=True)
        return {
            param: number for own, group in pairs for number, param in zip(own["params"], group["params"], strict=True)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"optimizer: the state_dict() of {type(optimizer).__qualname__} does not have the form of torch's "
            'optimizers ({"state": {number: ...}, "param_groups": [{"params": [number, ...], ...}]}), so its state '
            f"cannot be found by the parameters' names ({type(error).__name__}: {error}). Save what it "
            "wraps, and the rest in extra="
        ) from error
