"""Finds seeds that show a known fault of an older tree: run it where the fault still is.

python -m tests.instruments.differential.proof 17 18      # from the root of the tree, for these faults
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.helpers.ranks import close_pools
from tests.instruments.differential.generate import generate
from tests.instruments.differential.program import Program
from tests.instruments.differential.runner import run

FAULTS: dict[str, tuple[str, Callable[[Program], bool], str]] = {
    "sync": (
        "set_requires_gradient_sync leaves the all-reduce as it was",
        lambda p: (
            "replicate" in p.axes
            and "set_requires_all_reduce" in _kinds(p)
            and "set_requires_gradient_sync" in _kinds(p)
            and "set_gradient_divide_factor" not in _kinds(p)
        ),
        "grad .*fsdp2 has None, torch a gradient|grad .*torch agrees|OrderError",
    ),
    "transforms": (
        "torch.func around the first forward",
        lambda p: any(kind.startswith("torch.func") for kind in _kinds(p)),
        "element 0|SIGSEGV|fsdp2 has None",
    ),
    "factor": (
        "the divide factor of the last microbatch counts for all",
        lambda p: "replicate" in p.axes and "set_requires_all_reduce" in _kinds(p) and "factor" in " ".join(_kinds(p)),
        "^grad .*sharded",
    ),
    "by hand": (
        "a custom backward writes weight.grad",
        lambda p: "GradByHand" in p.kinds(),
        r"grad [^:]*\d\.weight\.grad",
    ),
    "inner backward": ("inner backwards start reductions", lambda p: "Tiled" in p.kinds(), "^(died|hang|grad|error)"),
    "names": ("the model's own names", lambda p: "Awkward" in p.kinds(), r"Settings\._|TypeError"),
    "hooks": ("hooks on unsharded weights", lambda p: "Hooked" in p.kinds(), "AttributeError.*mul_|^grad"),
    "order": (
        "a false OrderError for a replicated unit that is prefetched in backward",
        lambda p: "Scalar" in p.kinds() and "set_modules_to_backward_prefetch" in _kinds(p),
        "OrderError.*changed between",
    ),
    "recursion": ("a unit whose forward calls the root", lambda p: "Recursive" in p.kinds(), "got mixed"),
}


def _kinds(program: Program) -> set[str]:
    return {action.kind for action in program.actions}


def main() -> None:
    for name in sys.argv[1:] or FAULTS:
        what, fits, pattern = FAULTS[name]
        start, tried = time.monotonic(), 0
        for seed in range(200_000):
            if time.monotonic() - start > 60:
                print(f"{name}: not found in {tried} programs ({what})", flush=True)
                break
            program = generate(seed, 2)
            if not fits(program):
                continue
            tried += 1
            result = run(program, 20)
            if re.search(pattern, f"{result.kind} {result.text}", re.DOTALL) and result.kind != "same":
                text = result.text.replace("\n", "; ")[:200]
                print(f"{name}: seed {seed}, after {tried} programs: {result.kind}: {text}", flush=True)
                break
    close_pools()


if __name__ == "__main__":
    main()
