"""Faults put into the runtime on purpose: which of them the tests find, and which the fuzzer.

    python -m tests.differential.mutants            # all of them, or those that are named
    python -m tests.differential.mutants --seconds 60 partials-in-flight

Each mutant is one replacement in a copy of the tree. The fuzzer gets some seconds; what it reports is run on the
unchanged tree as well, and counts only if that is the same there. Then the test files that concern the code run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[2]
RUNTIME = "fsdp2/runtime/"


@dataclass(frozen=True)
class Mutant:
    """What it breaks, one replacement in a file, and the test files that concern it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    focus: str = ""  # words that programs contain which use the code


ACCUMULATION = ("tests/test_accumulation.py", "tests/test_hsdp.py")
BACKWARD = ("tests/test_backward_passes.py", "tests/test_forward_backward.py")

MUTANTS = (
    Mutant(
        "partials-in-flight",
        RUNTIME + "in_flight.py",
        "        while any(reduction.leaves_partials for reduction in self._reductions):\n",
        "        while False and self._reductions:\n",
        ACCUMULATION,
        focus="replicate,set_requires_all_reduce,set_reduce_scatter_max_input_buffers",
    ),
    Mutant(
        "reset-keeps-partials",
        RUNTIME + "gradients.py",
        "            param.partial = None\n            if param.unsharded",
        "            if param.unsharded",
        ("tests/test_exceptions.py", *ACCUMULATION),
        focus="replicate,reset_iter_state,set_requires_all_reduce",
    ),
    Mutant(
        "freeze-not-noticed",
        RUNTIME + "gradients.py",
        "                unsharded.requires_grad_(trainable)\n            self._note_trainable(index, unsharded)\n",
        "                unsharded.requires_grad_(trainable)\n"
        "            if index not in self._hooks:\n                self._note_trainable(index, unsharded)\n",
        ("tests/test_finetune.py", "tests/test_shared_frozen.py"),
        focus='"kind": "freeze"',
    ),
    Mutant(
        "list-not-completed",
        RUNTIME + "unit.py",
        "            self._move(Stage.IDLE)\n            self._reshard_after_forward()\n\n    def _hook_backward",
        "            self._move(Stage.IDLE)\n\n    def _hook_backward",
        ("tests/test_root.py", *BACKWARD),
        focus='"together": [0, 1',
    ),
    Mutant(
        "hooks-while-recomputing",
        RUNTIME + "unit.py",
        "            for group in self.groups:\n                group.gradients.keep_hooks_last()\n",
        "            pass\n",
        ("tests/test_ignored_and_hooks.py", "tests/test_checkpointing_kinds.py"),
        focus="Hooked,Checkpointed",
    ),
    Mutant(
        "no-second-set",
        RUNTIME + "gradients.py",
        "            return []\n        self.expect_all()\n",
        "            return []\n",
        BACKWARD,
        focus="Repeat",
    ),
    Mutant(
        "unused-filled-early",
        RUNTIME + "gradients.py",
        "        fill = at_end and settings.reduce_unused\n",
        "        fill = settings.reduce_unused\n",
        (*ACCUMULATION, *BACKWARD),
        focus="set_reduce_scatter_unused_params",
    ),
    Mutant(
        "unused-reduced-early",
        RUNTIME + "unit.py",
        "        if settings.requires_gradient_sync and not settings.reduce_unused:\n            for group",
        "        if settings.requires_gradient_sync:\n            for group",
        (*ACCUMULATION, *BACKWARD),
        focus="set_reduce_scatter_unused_params",
    ),
    Mutant(
        "any-hook-is-last",
        RUNTIME + "gradients.py",
        "        return post_accumulate_grad_hooks(self._unsharded[index])[-1] is hook\n",
        "        return True\n",
        ("tests/test_ignored_and_hooks.py",),
        focus="Hooked",
    ),
    Mutant(
        "setter-of-one-unit",
        "fsdp2/settings.py",
        "    return units_below(module) if recurse else [unit_for(module)]\n",
        "    return units_below(module)\n",
        ("tests/test_api.py", *ACCUMULATION),
        focus="recurse=False",
    ),
    Mutant(
        "no-grad-forward-keeps-shards",
        RUNTIME + "unit.py",
        "            self.reshard(to_smaller=how is not True, within_step=torch.is_grad_enabled())\n",
        "            self.reshard(to_smaller=how is not True, within_step=True)\n",
        ("tests/test_zero.py",),
        focus="ZeroPolicy,no_grad",
    ),
    Mutant(
        "failed-forward-runs-on",
        RUNTIME + "unit.py",
        "        self._to_run.clear()\n        self._move(Stage.BACKWARD)\n",
        "        self._move(Stage.BACKWARD)\n",
        BACKWARD,
        focus='"together": [0, 1',
    ),
    Mutant(
        "one-trainable-late",
        RUNTIME + "gradients.py",
        "            self._trainable ^= {index}\n            self.expect_all()\n",
        "            self._trainable ^= {index}\n",
        ("tests/test_finetune.py", "tests/test_shared_frozen.py"),
        focus='"kind": "freeze"',
    ),
    Mutant(
        "partials-only-with-gradients",
        RUNTIME + "gradients.py",
        "        may_have_partials = at_end and self._channel.roles.replicate_group is not None\n",
        "        may_have_partials = False\n",
        ACCUMULATION,
        focus="replicate,set_requires_all_reduce",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for mutant in MUTANTS:
        if not options.names or mutant.name in options.names:
            print(f"| {mutant.name} | {_try(mutant, options.seconds, options.seed)} |", flush=True)


def _try(mutant: Mutant, seconds: float, seed: int) -> str:
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        for name in ("fsdp2", "tests", "examples", "docs"):
            shutil.copytree(TREE / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(TREE / "pyproject.toml", folder)
        path = Path(folder, mutant.file)
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"the code has changed: {text.count(mutant.old)} places fit"
        path.write_text(text.replace(mutant.old, mutant.new))
        found = _fuzz(
            folder, "--seconds", str(seconds), "--seed", str(seed), "--stop", "4", "--containing", mutant.focus
        )
        real = next((line for line in found if not _fuzz(str(TREE), "--seed", _seed(line), "--count", "1")), None)
        if real is None:
            return "not found by the fuzzer"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not exhaustive", *mutant.tests]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment(folder))
        tests = "pass" if done.returncode == 0 else "FAIL"
        return f"{real[4:].strip()} | {tests}: {', '.join(mutant.tests)}"


def _fuzz(tree: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "tests.differential", "--timeout", "20", *options]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=_environment(tree))
    return [line for line in done.stdout.splitlines() if line.startswith("--- seed")]


def _seed(line: str) -> str:
    found = re.search(r"seed (\d+)", line)
    assert found is not None
    return found.group(1)


def _environment(tree: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
