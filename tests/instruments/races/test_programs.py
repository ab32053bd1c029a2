"""Whole programs under the race detector: silent, and the same values as without it; and faults that it finds.

`pytest --races` runs any test on ranks under the detector; `SUITES` are the modules for which that is done.
"""

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fsdp2.comm.gloo import _unwaited
from tests.helpers.mutants import Mutant
from tests.helpers.ranks import on_ranks, run_on_ranks
from tests.helpers.source_tree import ROOT
from tests.instruments.device.mutants import MUTANTS_HERE
from tests.instruments.differential.mutants import MISSED
from tests.instruments.races.mutants import MUTANTS
from tests.instruments.races.programs import PROGRAMS, num_ranks, run

COMPILES = "no dispatch mode works under torch.compile"
ON_CPU = "the order of the CPU, which frees memory when a unit reshards"
AT_ONCE = "it counts on the thread that steps; under the detector, which sees no threads, steps run at once"
ITS_OWN = "the test brings a stream, or an event, of its own"
USELESS = "what is read or sent too late, nobody uses: after an error, or when parameters have changed since"
# Modules, and tests of modules.
LEFT_OUT = {
    "tests/core/composition/test_compile.py": COMPILES,
    "tests/parallel/test_ring_attention.py::test_compiled": COMPILES,
    "tests/core/precision/test_extensions.py::test_arguments": ON_CPU,
    "tests/core/gradients/test_gradient_scaling.py::test_stream_of_the_all_reduce_hook": ITS_OWN,
    "tests/core/composition/test_comm_control.py::test_post_optim_event": ITS_OWN,
    "tests/core/memory/test_auto_prefetch.py::test_forward_that_raises_after_a_prefetch": USELESS,
    "tests/core/gradients/test_joint_step.py::test_other_meshes": USELESS,
    "tests/core/gradients/test_replicated_use.py::test_changed_between_forward_and_backward": USELESS,
    "tests/optim/test_offloaded.py::test_who_looks_waits": AT_ONCE,
    "tests/optim/test_offloaded.py::test_what_is_done_after_step_does_not_reach_it": AT_ONCE,
    "tests/optim/test_offloaded.py::test_loads_between_step_and_use": AT_ONCE,
    "tests/optim/test_offloaded.py::test_what_is_refused": AT_ONCE,
}
CORE = [
    f"core/{folder}/{path.stem}"
    for folder in ("composition", "gradients", "memory", "precision")
    for path in sorted((ROOT / "tests/core" / folder).glob("test_*.py"))
]
SUITES = (
    *(suite for suite in CORE if f"tests/{suite}.py" not in LEFT_OUT),
    *("core/sharding/test_unshard", "core/sharding/test_full_params", "core/sharding/test_groups"),
    *("parallel/test_pipeline", "parallel/test_pipelining", "parallel/test_ring_attention"),
    *("optim/test_step_in_backward", "optim/test_matrix_optimizer", "optim/test_matrix_states"),
    *("optim/test_stepped_runs", "optim/test_offloaded"),
    *("checkpoint/test_commit", "checkpoint/test_resume"),
)
# Eight in one process, which imports torch once.
BATCHES = [SUITES[start : start + 8] for start in range(0, len(SUITES), 8)]


def check(rank: int, name: str) -> None:
    expected = run(name, rank, look=False)
    actual = run(name, rank, look=True)
    assert expected and len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert torch.equal(mine, other)


def programs(ranks: int) -> list[Any]:
    """Those for so many ranks; the fast tier has those that have found faults of the library, and one on four ranks."""
    fast = ("offload", "staged_states", "replicas, reduced in 16 bits")
    names = [name for name in PROGRAMS if num_ranks(name) == ranks]
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.exhaustive) for name in names]


@on_ranks(2)
@pytest.mark.parametrize("name", programs(2))
def test_silent(rank: int, world_size: int, name: str) -> None:
    check(rank, name)


@on_ranks(4)
@pytest.mark.parametrize("name", programs(4))
def test_silent_on_four_ranks(rank: int, world_size: int, name: str) -> None:
    check(rank, name)


def test_mutants_change_the_modules_of_today() -> None:
    """Those of the lagging device and the fuzzer too: one that changes nothing would raise, and count as found."""
    for mutant in (*MUTANTS, *MUTANTS_HERE, *MISSED):
        with mutant.planted():
            pass


def look_for(rank: int, world_size: int, index: int) -> str:
    """What the detector says of a mutant; "" if nothing. Values are right all the same, as operators run at once."""
    mutant, text = MUTANTS[index], ""
    with mutant.planted():
        try:
            run(mutant.program, rank, look=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    gc.collect()
    _unwaited.clear()  # the detector has waited for these messages
    return text


SAMPLE = ("gather: no event after it", "reduction: nothing is kept until the end", "offload: the host does not wait")


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, id=each.name, marks=[] if each.name in SAMPLE else pytest.mark.exhaustive) for each in MUTANTS],
)
def test_a_wait_that_is_taken_out_is_found(mutant: Mutant) -> None:
    text = run_on_ranks(look_for, num_ranks(mutant.program), index=MUTANTS.index(mutant), timeout_s=100)[0]
    assert "races" in text or "freed" in text, text


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suites", BATCHES, ids=lambda suites: f"{suites[0]} to {suites[-1]}")
def test_suites_are_silent(suites: tuple[str, ...]) -> None:
    """The protective cases of other modules, with the order of an accelerator."""
    without = [f"--deselect={name}" for name in LEFT_OUT]
    modules = [f"tests/{suite}.py" for suite in suites]
    options = ["--races", "-q", "-m", "not exhaustive", "-p", "no:cacheprovider", *modules, *without]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
