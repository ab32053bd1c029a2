"""The units of this process, for optimizers that step them one by one. Layer: optim."""

from collections.abc import Iterable
from weakref import WeakSet

import torch

from fsdp2.runtime import hooks
from fsdp2.runtime.unit import Unit

__all__ = ["units_with"]

_units: WeakSet[Unit] = WeakSet()


def units_with(params: Iterable[torch.Tensor]) -> list[Unit]:
    """The units that manage any of these sharded parameters, or parts of them."""
    ids = {id(param) for param in params}
    found = [unit for made in _units for unit in (made, *made.followers)]
    return [unit for unit in found if any(id(p.sharded) in ids for group in unit.groups for p in group.params)]


hooks.unit_made.append(_units.add)
