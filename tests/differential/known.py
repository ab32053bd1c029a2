"""The differences from torch's FSDP2 that are known and wanted, each with its reason. docs/design.md shows this table.

What is not in it is a bug, here or in torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.differential.program import Action, Program

__all__ = ["KNOWN", "Known", "tolerates_type", "torch_cannot", "torch_gives_up"]


@dataclass(frozen=True)
class Known:
    """A known difference: what differs, and why.

    `torch_cannot` says in which programs torch is no reference from the start, `torch_raises` is a pattern of what it
    raises where fsdp2 and one process do not: from there on one process alone is the reference.
    """

    name: str
    reason: str
    torch_cannot: Callable[[Program], bool] | None = None
    torch_raises: str = ""


KNOWN = (
    Known(
        "0-dim parameters",
        "torch rejects them; here they are replicated",
        lambda program: "Scalar" in program.kinds(),
    ),
    Known(
        "trainable parameters of two dtypes in a unit",
        "torch rejects them; here there is one reduction for each dtype",
        lambda program: "TwoDtypes" in program.kinds(),
    ),
    Known(
        "a forward in inference mode, then training",
        "torch's unsharded parameters stay inference tensors; here they are made outside of inference mode",
        torch_raises="[Ii]nference",
    ),
)


def torch_cannot(program: Program) -> str:
    """Why torch cannot run the program; empty if it can."""
    for known in KNOWN:
        if known.torch_cannot is not None and known.torch_cannot(program):
            return known.name
    return ""


def torch_gives_up(theirs: Exception | None, ours: Exception | None, plain: Exception | None) -> str:
    """The known difference by which torch raises where fsdp2 does what one process does; empty if there is none."""
    if theirs is None or type(ours) is not type(plain):
        return ""
    for known in KNOWN:
        if known.torch_raises and re.search(known.torch_raises, str(theirs)):
            return known.name
    return ""


def tolerates_type(program: Program, action: Action, ours: Exception | None, theirs: Exception | None) -> bool:
    """Whether these may be what an action raised on fsdp2 and on torch."""
    if ours is None or theirs is None:
        return ours is theirs
    return isinstance(ours, type(theirs))
