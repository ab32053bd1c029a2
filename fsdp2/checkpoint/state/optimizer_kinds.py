"""Whether the state of one optimizer fits another. Pure: names in, text out.

With SGD's momentum in AdamW, or AdamW's moments in SGD, training does not continue: it becomes another training, or
fails with a `KeyError` at the first step. The states of Adam and AdamW have the same parts. An option selects which of
the two rules applies, and options are restored too, so AdamW's options would turn an Adam into AdamW.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fsdp2.placement.hooks import registered

__all__ = ["kinds_of", "unsure", "why_unfit"]

# Options that select the rule by which the state is used.
RULES = ("decoupled_weight_decay",)
# Options that schedulers add to the param groups.
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def kinds_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of the optimizer's class, then those of its base classes."""
    kind = registered.optimizers.kind_of(optimizer)
    return [cls.__name__ for cls in registered.optimizers.classes_of(optimizer)] if kind is None else [kind]


def why_unfit(
    optimizer: torch.optim.Optimizer,
    saved: Iterable[str],
    states: Iterable[tuple[Collection[str], Collection[str]]],
    options: Sequence[Mapping[str, Any]],
) -> str:
    """Why a saved state does not fit the optimizer; "" if it does.

    Args:
        saved: the kinds of the optimizers that saved it; empty if unknown.
        states: for each parameter, the parts of its current state (empty before the first step), and those of the saved
            one.
        options: the options of the saved param groups.
    """
    own, *bases = kinds_of(optimizer)
    others = sorted({*saved} - {own})
    if [*saved] and not others:
        return ""
    for now, parts in states:
        if others and now and {*now} != {*parts}:
            return _words(others, own, f"keeps {_list(parts)} of a parameter", f"has {_list(now)}")
    for group in options:
        names = {*group} - SCHEDULED
        differ = names != {*optimizer.defaults} and not {*others} <= {*bases}
        if not others:  # of an unknown kind; another version of torch, or the user, may have added options
            here = {*optimizer.defaults}.union(*optimizer.param_groups)
            differ = bool(names - here and {*optimizer.defaults} - names)
        if differ:
            return _words(others, own, f"has the options {_list(names)}", f"has {_list(optimizer.defaults)}")
        for rule in RULES:
            if group.get(rule) != optimizer.defaults.get(rule) and (others or rule in group):
                what = [f"has {rule}={each.get(rule)!r}" for each in (group, optimizer.defaults)]
                return _words(others, own, *what)
    return ""


def unsure(
    optimizer: torch.optim.Optimizer, saved: Iterable[str], states: Iterable[tuple[Collection[str], Collection[str]]]
) -> str:
    """A warning where it cannot be decided whether the state fits: for an optimizer of another library that has not
    stepped yet and has the same options as the one that saved; "" otherwise."""
    own, *bases = kinds_of(optimizer)
    others = sorted({*saved} - {own, *bases})
    pairs = [*states]
    first = registered.optimizers.classes_of(optimizer)[0]
    of_torch = first.__module__.startswith("torch.optim.")  # whose options differ if its states do
    if not others or of_torch or not pairs or any(now for now, _ in pairs):
        return ""
    return (
        f"optimizer state saved by {', '.join(others)} is given to {own}, which has made no step yet, so whether it "
        f"can use {_list({part for _, parts in pairs for part in parts})} is not known. Leave optimizer= out to begin "
        "with a fresh state."
    )


def _words(others: Sequence[str], own: str, saved: str, here: str) -> str:
    who = ", ".join(others) or "another optimizer"
    return (
        f"optimizer state of {who}, and this is {own}: the saved one {saved}, this one {here}. Leave optimizer= out to "
        "begin with a fresh state."
    )


def _list(names: Iterable[object]) -> str:
    return ", ".join(sorted(str(name)[:80] for name in [*names][:30])) or "nothing"
