"""Weights that several modules hold, but not all in units of one root. Layer: checks."""

from collections.abc import Sequence

from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.runtime.parameter import ManagedParameter, managed_by
from fsdp2.runtime.unit import Unit


def check_weights(units: Sequence[Unit]) -> None:
    """Check the weights below a new root.

    Raises:
        ArgumentError: a weight belongs to two groups, is managed under one name but not under another, or belongs to a
            unit of another root.
    """
    _check_tied(units[0].modules[0], [param for unit in units for param in unit.params])
    _check_borrowed(units)


def _check_tied(root: nn.Module, params: Sequence[ManagedParameter]) -> None:
    """Raise if a weight belongs to two groups, or is managed under only one of its names: training would update two
    copies."""
    advice = "Call fully_shard once on the list of the modules that share it: fully_shard([a, b])."
    for fqn, plain in root.named_parameters():
        managed = managed_by(plain)
        if managed is not None and managed in params and managed.unsharded is not plain:
            raise ArgumentError(f"'{fqn}' and '{managed.fqn}' are one weight; only the second is sharded. {advice}")


def _check_borrowed(units: Sequence[Unit]) -> None:
    """Raise if a unit holds a weight of a unit with another root, because two roots have separate backwards."""
    owned = {id(group) for unit in units for group in unit.groups}
    for unit in units:
        for group in unit.borrowed:
            if id(group) not in owned:
                raise ArgumentError(
                    f"unit '{unit.name}' holds a weight that belongs to a unit outside of this root (one of "
                    f"{[param.fqn for param in group.params]}). Call fully_shard on a module that contains both and "
                    "run that one's forward, or give each model a weight of its own."
                )
