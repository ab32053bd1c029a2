"""When units are gathered, freed and reduced, in one line to read: `+0 +1 -0` is an unshard of layer 0 and of layer 1,
and a reshard of layer 0; `~0` is the reduce-scatter of layer 0."""

from collections.abc import Iterable

from torch import nn

from fsdp2 import events
from tests.helpers.parity_models import batch

__all__ = ["order", "orders"]

SIGNS = {"unshard": "+", "reshard": "-", "reduce_scatter": "~"}


def order(log: Iterable[events.Event], kinds: Iterable[str] = ("unshard", "reshard")) -> str:
    """Events of these kinds. Units of `layers` are numbers; events without a sign have the name of their kind."""
    found = []
    for event in log:
        if event.kind in kinds:
            unit = event.unit.removeprefix("layers.") or "root"
            found.append(SIGNS.get(event.kind, f"{event.kind}:") + unit)
    return " ".join(found)


def orders(model: nn.Module, rank: int, *more: str) -> tuple[str, str]:
    """Of a forward of a model of four inputs, and of its backward."""
    with events.record() as forward:
        loss = model(batch(0, rank, 4)).sum()
    with events.record() as backward:
        loss.backward()
    kinds = ("unshard", "reshard", *more)
    return order(forward, kinds), order(backward, kinds)
