"""The differences from torch's FSDP2 that are known and wanted. What is not in it is a bug, here or in torch; but for
what `compare.py` does not compare, and says why."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.instruments.differential.choices import BEYOND_TORCH
from tests.instruments.differential.program import Action, Program

REVERSE = ("torch.func.vjp", "torch.func.grad", "torch.func.jacrev")  # they run a backward


@dataclass(frozen=True)
class Situation:
    """Before an action: whether gradients have not been reduced, and whether some parameter is unsharded.

    After it: whether some unit's gradients had waited for an all-reduce, and the backward brought it no new ones.
    """

    waiting: bool
    unsharded: bool
    only_partials: bool = False


@dataclass(frozen=True)
class Known:
    """A known difference: what differs, and what each side does.

    From a known difference on, one process alone is the reference. `in_program` says in which programs torch is none
    from the start, `torch_raises` is a pattern of what it raises where fsdp2 and one process do not (in the programs of
    `raises_in`), `dies_in` in which programs its process may die, `at_action` says after which action of a program
    torch's state is no longer the documented one, and `forms` in which programs the two may differ in when they give
    unsharded parameters back.
    """

    name: str
    sides: str
    in_program: Callable[[Program], bool] = lambda program: False
    torch_raises: str = ""
    raises_in: Callable[[Program], bool] = lambda program: True
    dies_in: Callable[[Program], bool] = lambda program: False
    fsdp2_raises: str = ""
    at_action: Callable[[Program, Action, Situation], bool] = lambda program, action, situation: False
    forms: Callable[[Program, Action], bool] = lambda program, action: False


def _has_factor(program: Program) -> bool:
    return any("divide_factor" in action.kind for action in program.actions)


def _shard_size(program: Program) -> int:
    return program.mesh[program.axes.index("shard")]


def runs_twice(program: Program) -> bool:
    """Whether some unit may run twice before a backward."""
    if program.kinds() & {"Repeat", "Teacher", "Recursive"}:
        return True
    forwards = 0
    for action in program.actions:
        for route in re.findall(r"\((\d+(?:, \d+)*),\)", action.code):
            blocks = route.split(", ")
            if len(set(blocks)) < len(blocks):
                return True
        forwards = forwards + 1 if action.makes is not None else 0 if action.kind == "backward" else forwards
        if forwards > 1 or action.kind == "two forwards in a loss" or "retain_graph" in action.code:
            return True
    return False


def calls_part(program: Program) -> bool:
    """Whether a module is called that is one of several in a unit."""
    parts = [path for unit in program.units() if len(unit.modules) > 1 for path in unit.modules]
    return any(f"{path}(" in action.code for path in parts for action in program.actions)


def _ran_backward_in_forward(program: Program, action: Action) -> bool:
    """Whether a backward goes through a transform that has run a backward itself."""
    made = {each.makes for each in program.actions if each.kind in REVERSE}
    return action.kind == "backward" and any(slot in made for slot in action.needs)


TRANSFORMS = "transforms of torch.func, and a backward through them that reads no parameters which were resharded"
LISTS = "a backward that comes to a part of a unit of several modules, called by itself"

EVALUATED = "after a forward without gradients, unless the program keeps parameters unsharded"
KEPT = "a loss that reads what a module kept"


def is_evaluation(action: Action) -> bool:
    return action.kind in ("forward in torch.no_grad()", "forward in torch.inference_mode()")


def asks_by_name(action: Action) -> bool:
    """Whether a backward is for parameters that the program lists."""
    return action.kind == "backward" and "parameters()" in action.code


def made_by(program: Program, action: Action) -> str:
    return " ".join(each.code for each in program.actions if each.makes in action.needs)


KNOWN = (
    Known(
        EVALUATED,
        "torch: the root stays unsharded; averages, edits, clipping, `zero_grad` and optimizers of these "
        "parameters are lost; fsdp2: its modules hold the shards",
        at_action=lambda program, action, situation: (
            situation.unsharded and action.kind in ("average", "clip", "zero_grad", "optimizer", "late", "look")
        ),
        forms=lambda program, action: any(map(is_evaluation, program.actions)),
    ),
    Known(
        "an edit of an unsharded parameter outside of forward and backward",
        "torch: lost at the next reshard; fsdp2: reaches the shards; through `.data` it is lost too (not generated)",
        at_action=lambda program, action, situation: situation.unsharded and action.kind == "edit",
    ),
    Known(
        "a weight that is written to in forward",
        "torch: lost at the next reshard; gradients are wrong; fsdp2: an error",
        in_program=lambda program: bool(program.kinds() & {"Masked", "MaxNorm"}),
    ),
    Known(
        KEPT + ", and a backward that reaches a unit by no output of it",
        "torch: gradients may be left unreduced; fsdp2: trains; where a unit was resharded since, as with torch an "
        "error or a segmentation fault (not generated)",
        at_action=lambda program, action, situation: action.kind == "backward" and ".kept" in made_by(program, action),
    ),
    Known(
        "hooks on parameters: `register_hook`, and post-accumulate hooks from before `fully_shard`",
        "torch: never run; fsdp2: see the reduced gradient, and may replace it",
        in_program=lambda program: bool(program.before) or any(a.kind == "gradient hook" for a in program.actions),
    ),
    Known(
        "post-accumulate hooks of a unit that runs several times, after a backward without gradient sync",
        "torch: run twice, as it reduces twice; fsdp2: run once, on the whole gradient",
        at_action=lambda program, action, situation: (
            action.kind == "backward"
            and situation.waiting
            and runs_twice(program)
            and any(each.kind == "accumulated hook" for each in program.actions)
        ),
    ),
    Known(
        "`backward(inputs=...)` and `torch.autograd.grad` with sharded parameters",
        "torch: no gradients; fsdp2: none, and the next step warns",
        at_action=lambda program, action, situation: asks_by_name(action),
    ),
    Known(
        "`p.data = ...` of a sharded parameter",
        "torch: changes nothing; fsdp2: nothing, with a warning at the next forward",
        at_action=lambda program, action, situation: action.kind == "data",
    ),
    Known(
        "`fully_shard` after the first forward",
        "torch: trains nothing for a step, and fails later; fsdp2: an error",
        at_action=lambda program, action, situation: action.kind == "late",
    ),
    Known(
        "`step_in_backward`",
        "torch: none; fsdp2: steps units in backward; an error where a unit runs twice in reentrant checkpoints",
        in_program=lambda program: any(action.kind == "step_in_backward" for action in program.actions),
    ),
    Known(
        "0-dim parameters",
        "torch: rejected; fsdp2: replicated; one all-reduce more for the units that have some",
        in_program=lambda program: "Scalar" in program.kinds(),
    ),
    Known(
        "a step while parameters are unsharded, after a forward without a backward or because resharding is off",
        "torch: the next forward computes with the values from before; fsdp2: the next forward gathers them again",
        at_action=lambda program, action, situation: action.kind in ("step", "scaler") and situation.unsharded,
    ),
    Known(
        "trainable parameters of several dtypes in a unit",
        "torch: rejected; fsdp2: one reduction for each dtype",
        in_program=lambda program: "TwoDtypes" in program.kinds(),
    ),
    Known(
        "custom gradient divide factor on gloo",
        "torch: fails (no pre-multiplied sum); fsdp2: divides after the sum",
        torch_raises="PREMUL_SUM",
    ),
    Known(
        "custom gradient divide factor, forced sums, one rank on the shard axis",
        "torch: divides twice; fsdp2: divides once, as one process",
        in_program=lambda program: _has_factor(program) and _shard_size(program) == 1,
    ),
    Known(
        "custom gradient divide factor, forced sums, backwards without all-reduce",
        "torch: divides what the earlier backwards left by the factor of the last; "
        "fsdp2: divides by the factor that held when a gradient was reduced, as torch does without forced sums",
        in_program=lambda program: (
            _has_factor(program)
            and "replicate" in program.axes
            and any(action.kind == "set_requires_all_reduce" for action in program.actions)
        ),
    ),
    Known(
        "HSDP gradients that wait for their all-reduce, and a backward that brings no new ones",
        "torch: they wait on; fsdp2: they are all-reduced",
        at_action=lambda program, action, situation: (
            situation.only_partials
            or ("autograd.grad" in action.code and situation.waiting and "replicate" in program.axes)
        ),
    ),
    Known(
        "transforms of torch.func that run a unit's backward after it was resharded",
        "torch: fails: the storage is gone; or dies of a segmentation fault; fsdp2: gathers it again",
        torch_raises="out of bounds for storage of size 0",
        dies_in=lambda program: any("torch.func" in action.code for action in program.actions),
        forms=lambda program, action: any("torch.func" in each.code for each in program.actions),
    ),
    Known(
        TRANSFORMS,
        "torch: may leave gradients unreduced: a later backward adds them to its own, or `reshard` forgets them; "
        "fsdp2: reduces them",
        at_action=lambda program, action, situation: (
            _ran_backward_in_forward(program, action)
            or (
                action.kind in REVERSE
                and any(a.kind == "set_reshard_after_backward" and not a.value for a in program.actions)
            )
        ),
    ),
    Known(
        LISTS,
        "torch: may leave gradients unreduced, and the unit unsharded; fsdp2: reduces them",
        forms=lambda program, action: calls_part(program),
    ),
    Known(
        "transforms of torch.func that run a backward while gradients wait unreduced",
        "torch: fails: the reduction copies within the transform; fsdp2: reduces them outside of it",
        torch_raises=r"attempted to call in-place operation \(aten::copy_\)",
        raises_in=lambda program: any("torch.func" in action.code for action in program.actions),
    ),
    Known(
        "a custom backward that writes `weight.grad` in the compute dtype, under another reduce dtype",
        "torch: reduces it; fsdp2: an error: gradients wait in the reduce dtype (as torch 2.15)",
        fsdp2_raises="attempting to assign a gradient with dtype",
    ),
    Known(
        "stages of ZeRO, and other options that torch lacks",
        "torch: none; fsdp2: `ZeroPolicy`, fields of `MixedPrecisionPolicy`, setters",
        in_program=lambda program: (
            "ZeroPolicy" in program.options()
            or "Fsdp2Policy" in program.options()
            or any(action.kind in BEYOND_TORCH for action in program.actions)
        ),
    ),
    Known(
        "`requires_grad_` on a parameter that is unsharded",
        "torch: the sharded parameter does not follow; fsdp2: it follows",
        at_action=lambda program, action, situation: action.kind == "freeze" and situation.unsharded,
    ),
    Known(
        "`to` another dtype and back, after a forward",
        "torch: the next step fails, or computes in the other dtype; fsdp2: computes in the dtype of the parameters",
        torch_raises="Expected out tensor to have dtype",
        at_action=lambda program, action, situation: action.kind == "to" and "HalfDouble" in program.kinds(),
    ),
    Known(
        "a forward in inference mode, then training",
        "torch: fails, or trains nothing: unsharded parameters stay inference tensors; fsdp2: trains",
        torch_raises="[Ii]nference",
        at_action=lambda program, action, situation: (
            "inference" in action.code and action is next(each for each in program.actions if each.makes is not None)
        ),
        forms=lambda program, action: any("inference" in each.code for each in program.actions),
    ),
    Known(
        "`reset_iter_state` while gradients wait unreduced",
        "torch: keeps them: the next backward adds to them; fsdp2: drops them, as documented",
        at_action=lambda program, action, situation: action.kind == "reset_iter_state" and situation.waiting,
    ),
    Known(
        "a forward or a backward after a backward that raised, without `reset_iter_state`",
        "torch: computes with what that left; fsdp2: an error that says what to call",
        fsdp2_raises="the last backward has not finished",
    ),
    Known(
        "a step, a clip or a `zero_grad` while gradients wait unreduced",
        "torch: silent; fsdp2: a warning that names units and setter; an error at the second step or clip, if nothing "
        "was ever reduced",
        fsdp2_raises="gradients of .* were not reduced",
    ),
    Known(
        "reentrant checkpoint around a unit that runs twice in a step",
        "torch: gradients differ from one process; the unit stays unsharded; fsdp2: gradients as in one process",
        in_program=lambda program: "reentrant=True" in program.source() and runs_twice(program),
    ),
    Known(
        "a net that calls itself",
        "torch: works where the outer call needs nothing more of what the inner one reshards; else fails, or dies of a "
        "segmentation fault; fsdp2: the inner call leaves the parameters to the outer one",
        in_program=lambda program: "Recursive" in program.kinds(),
    ),
    Known(
        "a backward without gradient sync that passes a unit which has never been unsharded, with a reduce dtype",
        "torch: fails: there is no unsharded parameter; fsdp2: nothing to do",
        torch_raises="'FSDPParam' object has no attribute '_unsharded_param'",
        raises_in=lambda program: "mp_policy" in program.options(),
    ),
    Known(
        "autocast around a unit's first forward without gradients, and one with gradients",
        "torch: its weights get no gradient in that step; fsdp2: gradients as in one process",
        at_action=lambda program, action, situation: (
            action.kind == "forward in autocast" and "Teacher" in program.kinds()
        ),
    ),
    Known(
        "HSDP gradients that wait for their all-reduce, and a backward that brings some of a unit's parameters alone",
        "torch: fails, or adds them to other parameters' gradients; fsdp2: each waits for itself",
        torch_raises=r"The size of tensor a \(\d+\) must match the size of tensor b",
        raises_in=lambda program: any(action.kind == "set_requires_all_reduce" for action in program.actions),
    ),
    Known(
        "under transforms of torch.func: an int for `reshard_after_forward`, or parameters frozen or trained anew",
        "torch: fails: it makes parameters, or sets `requires_grad`, within the transform; "
        "fsdp2: does so outside of it",
        torch_raises=r"attempting to call Tensor.requires_grad_\(\)",
        raises_in=lambda program: (
            "reshard_after_forward=2" in program.options() or any(a.kind == "freeze" for a in program.actions)
        ),
    ),
    Known(
        "an int for `reshard_after_forward`, and a `shard_placement_fn` that chooses another dim than 0",
        "torch: fails: what it keeps in the smaller group is flat, and has no such dim; fsdp2: works",
        torch_raises="list index out of range",
        raises_in=lambda program: (
            "reshard_after_forward=2" in program.options() and "shard_placement_fn" in program.options()
        ),
    ),
    Known(
        "`reset_iter_state` on a root that has not run yet",
        "torch: fails: what it resets is made by the first forward; fsdp2: nothing to reset",
        torch_raises="'FSDPCommContext' object has no attribute",
    ),
    Known(
        "an int for `reshard_after_forward`, and `set_reshard_after_forward` before backward",
        "torch: fails: it has lost the smaller group; fsdp2: holds from the next forward on",
        torch_raises="Expected mesh_info to be FSDPMeshInfo",
    ),
    Known(
        "a parameter that was frozen when its unit was first gathered, and trains later in mixed precision",
        "torch: fails: the dtype of its gradient was not set; fsdp2: trains",
        torch_raises="attempting to assign a gradient with dtype",
        raises_in=lambda program: any(a.kind == "freeze" and "(True)" in a.code for a in program.actions),
    ),
    Known(
        "`copy.deepcopy`", "torch: refused; fsdp2: a sharded model of its own", torch_raises="does not support deepcopy"
    ),
    Known(
        "`set_reduce_scatter_unused_params`, a unit that has never run",
        "torch: takes no part until it has run once; fsdp2: zeros, as for units that have run before",
    ),
    Known(
        "after a backward that `set_is_last_backward(False)` precedes: units that it has not gone through",
        "torch: resharded; fsdp2: what is unsharded stays so for the next backward",
        forms=lambda program, action: any(a.kind == "set_is_last_backward" and not a.value for a in program.actions),
    ),
)
