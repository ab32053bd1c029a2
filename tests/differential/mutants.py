"""Faults put into the runtime on purpose, and a program of the fuzzer that finds each.

    python -m tests.differential.mutants            # all of them, or those that are named

Workers import one module of fsdp2 with the fault in it, and run the kept program `missed/NAME.json`; it must differ
there, and be the same on the tree as it is. docs/testing.md has the table.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.differential.mutated import run_mutated
from tests.differential.program import Program
from tests.helpers.ranks import close_pools

__all__ = ["MISSED", "MISSED_BEFORE", "Mutant", "find"]

PROGRAMS = Path(__file__).parent / "missed"


@dataclass(frozen=True)
class Mutant:
    """Replacements, old and new text, in a module of fsdp2."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]

    @property
    def program(self) -> Program:
        """The program that finds it."""
        return Program.from_json((PROGRAMS / f"{self.name}.json").read_text())


# Not found by today's other tests, in the protective tier.
MISSED = (
    Mutant(
        "forward-in-part",  # a list of modules of which the forward ran some, then a backward
        "fsdp2.runtime.unit",
        (
            (
                "self.stage = stage\n        self._to_run.clear()\n",
                "self.stage = stage\n        if stage is not Stage.IDLE:\n            self._to_run.clear()\n",
            ),
        ),
    ),
)

# Not found by the tests from before the fuzzer: faults that the tree had, put back.
MISSED_BEFORE = (
    Mutant(
        "all-reduce-left-off",
        "fsdp2.settings",
        (("requires_gradient_sync=sync, requires_all_reduce=sync)", "requires_gradient_sync=sync)"),),
    ),
    Mutant(
        "last-factor-counts",
        "fsdp2.runtime.parameter",
        (
            (
                "return self.flat if divisor == self.divisor else self.flat * (divisor / self.divisor)",
                "return self.flat",
            ),
        ),
    ),
    Mutant(
        "gradients-by-hand",
        "fsdp2.runtime.gradients",
        (("any(map(_is_there, map(grad_of, self._unsharded)))", "not self.none_arrived"),),
    ),
    Mutant(
        "inner-backwards-reduce",
        "fsdp2.runtime.gradients",
        (("gradients._backward in (None, running_backward())", "True"),),
    ),
    Mutant(
        "hooks-after-reduction",
        "fsdp2.runtime.gradients",
        (
            ("        self.keep_hooks_last()\n", ""),
            ("return post_accumulate_grad_hooks(self._unsharded[index])[-1] is hook", "return True"),
        ),
    ),
    Mutant(
        "torch-func-unhooked",
        "fsdp2.runtime.hooks",
        (("    if tensors_have_levels():\n", "    if False:\n"),),
    ),
    Mutant(
        "false-order-error",
        "fsdp2.runtime.param_group",
        (
            ("elif self._used_at is not None and versions", "elif versions"),
            ("self._finish_gathering()  #", "self.wait_for_unshard()  #"),
        ),
    ),
    Mutant(
        "converted-before-backward",
        "fsdp2.runtime.param_group",
        (("self._fits = self._unsharded.follow_shards()", "self._fits = False"),),
    ),
    Mutant(
        "call-within-itself",
        "fsdp2.runtime.unit",
        (
            (
                "self.stage is Stage.FORWARD and len(self._modules) == 1 and is_within_itself(module)",
                "False",
            ),
        ),
    ),
)


def find(mutant: Mutant) -> str:
    """How the program differs on the mutant; "" where it does not, or where it differs on the tree as it is."""
    from tests.differential.runner import run  # not above: workers import this module, and must not import fsdp2 yet

    program = mutant.program
    if run(program).kind != "same":
        return ""
    close_pools()  # its workers have imported fsdp2
    result = run(program, body=run_mutated, module=mutant.module, changes=mutant.changes)
    close_pools()
    return "" if result.kind == "same" else f"{result.kind} at action {result.at}: {result.text}"


def main() -> None:
    names = sys.argv[1:]
    for mutant in (*MISSED, *MISSED_BEFORE):
        if not names or mutant.name in names:
            start = time.monotonic()
            found = find(mutant).partition("\n")[0][:110] or "NOT FOUND"
            print(f"{mutant.name}: {time.monotonic() - start:.1f} s: {found}", flush=True)


if __name__ == "__main__":
    main()
