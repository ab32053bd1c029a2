"""Faults put into the runtime on purpose, and a program of the fuzzer that finds each.

The kept program `missed/NAME.json` must differ with the fault, and be the same without it.
"""

from pathlib import Path
from typing import Any

from tests.helpers.mutants import Mutant
from tests.instruments.differential.interpret import run_program
from tests.instruments.differential.program import Program
from tests.instruments.differential.runner import run

__all__ = ["MISSED", "find"]

PROGRAMS = Path(__file__).parent / "missed"

# Other tests did not find them when they were put in. But for the first, the tree had them once.
MISSED = (
    Mutant(  # a list of modules of which the forward ran some, then a backward
        "forward-in-part", "runtime.forward", "(state.stage is not Stage.FORWARD or", "(not state.to_run or"
    ),
    Mutant(
        "all-reduce-left-off",
        "settings",
        "requires_gradient_sync=sync, requires_all_reduce=sync)",
        "requires_gradient_sync=sync)",
    ),
    Mutant(
        "last-factor-counts",
        "runtime.reduction",
        "return self.flat if divisor == self.divisor else self.flat * (divisor / self.divisor)",
        "return self.flat",
    ),
    Mutant(
        "gradients-by-hand",
        "runtime.gradients",
        "(at_end and self.partials) or 1 in has_grad",
        "(at_end and self.partials) or self.arrived",
    ),
    Mutant("inner-backwards-reduce", "runtime.gradients", "backward is None or backward == running_backward()", "True"),
    Mutant(
        "hooks-after-reduction",
        "runtime.gradients",
        "        self.keep_hooks_last()\n",
        "",
        also=((" and next(reversed((hooks_of(unsharded) or {}).values())) is hook", ""),),
    ),
    Mutant(
        "torch-func-unhooked",
        "runtime.autograd",
        'return hooks.implementation(hooks.levels, "begin", "torch.func")(callback, output)',
        "pass",
    ),
    Mutant("false-order-error", "runtime.changes", "elif self._used_at is not None and versions", "elif versions"),
    Mutant(
        "call-within-itself",
        "runtime.forward",
        "is_new = not is_recomputation and len(state.calls) == 1",
        "is_new = not is_recomputation",
    ),
)


def run_mutated(rank: int, world_size: int, name: str, **options: Any) -> Any:
    with next(each for each in MISSED if each.name == name).planted():
        return run_program(rank, world_size, **options)


def find(mutant: Mutant) -> str:
    """How the program differs on the mutant; "" where it does not, or where it differs on the tree as it is."""
    program = Program.from_json((PROGRAMS / f"{mutant.name}.json").read_text())
    if run(program).kind != "same":
        return ""
    result = run(program, body=run_mutated, name=mutant.name)
    return "" if result.kind == "same" else f"{result.kind} at action {result.at}: {result.text}"
