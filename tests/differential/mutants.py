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
from tests.ranks import close_pools

__all__ = ["MENDS", "MISSED", "Mutant", "find"]

PROGRAMS = Path(__file__).parent / "missed"


@dataclass(frozen=True)
class Mutant:
    """One replacement in a module of fsdp2."""

    name: str
    module: str
    old: str
    new: str

    @property
    def program(self) -> Program:
        """The program that finds it."""
        return Program.from_json((PROGRAMS / f"{self.name}.json").read_text())


# Every protective test that runs the line passes on these.
MISSED: tuple[Mutant, ...] = ()

# Mends taken out.
MENDS = (
    Mutant(
        "gradients-by-hand",
        "fsdp2.runtime.gradients",
        "any(map(_is_there, map(grad_of, self._unsharded)))",
        "not self.none_arrived",
    ),
)


def find(mutant: Mutant) -> str:
    """How the program differs on the mutant; "" where it does not, or where it differs on the tree as it is."""
    from tests.differential.runner import run  # not above: workers import this module, and must not import fsdp2 yet

    program = mutant.program
    if run(program).kind != "same":
        return ""
    close_pools()  # its workers have imported fsdp2
    fault = {"module": mutant.module, "old": mutant.old, "new": mutant.new}
    result = run(program, body=run_mutated, **fault)
    close_pools()
    return "" if result.kind == "same" else f"{result.kind} at action {result.at}: {result.text}"


def main() -> None:
    names = sys.argv[1:]
    for mutant in (*MISSED, *MENDS):
        if not names or mutant.name in names:
            start = time.monotonic()
            found = find(mutant).partition("\n")[0][:110] or "NOT FOUND"
            print(f"{mutant.name}: {time.monotonic() - start:.1f} s: {found}", flush=True)


if __name__ == "__main__":
    main()
