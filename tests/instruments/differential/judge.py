"""Asks the table of known differences (`known.py`) about what happened, and whether fsdp2 may refuse it."""

import re

from fsdp2.errors import FSDPError, OrderError
from tests.instruments.differential.known import (
    KNOWN,
    LISTS,
    TRANSFORMS,
    Situation,
    asks_by_name,
    calls_part,
    made_by,
    runs_twice,
)
from tests.instruments.differential.models import Boom
from tests.instruments.differential.program import Action, Program

FREED = "storage of size 0|mixed torch.Tensor and DTensor"
GOES_ON = ("`copy.deepcopy`",)  # torch refuses these, and remains the reference


def torch_cannot(program: Program) -> str:
    """Why torch cannot run the program; empty if it can."""
    for known in KNOWN:
        if known.in_program(program):
            return known.name
    return ""


def torch_dies(program: Program) -> str:
    """The known difference by which torch's process may die; empty if there is none."""
    return next((known.name for known in KNOWN if known.dies_in(program)), "")


def torch_gives_up(program: Program, theirs: Exception | None, ours: Exception | None, plain: Exception | None) -> str:
    """The known difference by which torch raises where fsdp2 does what one process does; empty if there is none."""
    cannot = plain is not None and "inplace operation" in str(plain)
    if theirs is None or (type(ours) is not type(plain) and not cannot):
        return ""
    for known in KNOWN:
        if known.torch_raises and known.raises_in(program) and re.search(known.torch_raises, str(theirs)):
            return known.name
    return ""


def fsdp2_refuses(ours: Exception | None, theirs: Exception | None) -> str:
    """The known difference by which fsdp2 raises and torch goes on, if only to where the program fails; else empty."""
    if ours is None or not (theirs is None or isinstance(theirs, Boom)):
        return ""
    return next((k.name for k in KNOWN if k.fsdp2_raises and re.search(k.fsdp2_raises, str(ours))), "")


def may_refuse(program: Program, at: int, ours: Exception | None) -> str:
    """Why a clear error is as good as what one process does; empty if it is not."""
    action, so_far = program.actions[at], program.actions[: at + 1]
    if ours is None:
        return ""
    if any(map(asks_by_name, so_far)) and (isinstance(ours, FSDPError) or "to not have been used in" in str(ours)):
        return "refused: gradients asked for by name"
    if action.kind == "data" or (isinstance(ours, FSDPError) and any(each.kind == "data" for each in so_far)):
        return "refused: `p.data = ...`"
    if action.kind == "backward" and ".kept" in made_by(program, action) and re.search(FREED, str(ours)):
        return "refused: a backward that comes to a resharded unit by no output of it"
    reenters = "reentrant=True" in program.source() and runs_twice(program)
    if reenters and isinstance(ours, OrderError) and "step_in_backward stepped them" in str(ours):
        return "refused: `step_in_backward` of a unit that runs twice in reentrant checkpoints"
    if isinstance(ours, FSDPError) and any(each.kind == "late" for each in so_far):
        return "refused: late"
    if isinstance(ours, FSDPError) and "in place" in str(ours):
        return "refused: a write to an unsharded weight"
    return ""


def torch_is_lost(program: Program, action: Action, situation: Situation) -> str:
    """The known difference by which torch's state is not the documented one after an action."""
    for known in KNOWN:
        if known.at_action(program, action, situation):
            return known.name
    return ""


def why_left(program: Program) -> str:
    """The known difference by which torch leaves gradients unreduced, on parameters that it has not resharded."""
    if any("torch.func" in action.code for action in program.actions) or "Transforms" in program.kinds():
        return TRANSFORMS
    return LISTS if calls_part(program) else ""


def fills_zeros(program: Program) -> bool:
    """Whether parameters may get zeros as gradients: see the row of `set_reduce_scatter_unused_params`."""
    return any(action.kind == "set_reduce_scatter_unused_params" and action.value for action in program.actions)


def tolerates_form(program: Program, action: Action) -> bool:
    """Whether the two may differ in which parameters are unsharded."""
    return any(known.forms(program, action) for known in KNOWN)


def tolerates_type(program: Program, action: Action, ours: Exception | None, theirs: Exception | None) -> bool:
    """Whether these may be what an action raised on fsdp2 and on torch."""
    if ours is None or theirs is None:
        return ours is theirs
    return isinstance(ours, type(theirs))


def needs_shards(action: Action) -> bool:
    """Whether an action means the optimizer's parameters, and takes others if the model's are unsharded."""
    if action.kind == "clip":
        return "torch.nn.utils" in action.code
    return "hook" in action.kind or action.kind in ("hand", "forget", "optimizer", "average")
