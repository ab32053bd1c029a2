"""What is no fault: a rank that does something else for many times a step. Training goes on, and gives what it gives
without (docs/launching.md). Real processes, because a false alarm would break their process groups."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import checkpoint
from tests.helpers.faults import Fault, Job, Told
from tests.helpers.mortal_ranks import Case, run_cases

PAUSE_S = 4.0
NUM_STEPS = 4


class Slow:
    """A part of a checkpoint that takes long to get."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, object]:
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


def slow_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    time.sleep(PAUSE_S)
    return graph.forward


def compiles(job: Job) -> None:
    """One rank compiles its own loss."""
    torch.compile(lambda x: (x * x).sum(), backend=slow_compiler)(torch.ones(4))


def evaluates(job: Job) -> None:
    """One rank evaluates a model that is not sharded."""
    model, end = nn.Linear(64, 64), time.monotonic() + PAUSE_S
    while time.monotonic() < end:
        model(torch.randn(64, 64))


def is_debugged(job: Job) -> None:
    """All threads of one rank are stopped, as gdb and py-spy do it."""
    target, tracer = os.getpid(), os.fork()
    if tracer:
        _, status = os.waitpid(tracer, 0)
        assert status == 0, "no permission to trace"
        return
    try:
        ptrace = ctypes.CDLL(None).ptrace
        threads = [int(name) for name in os.listdir(f"/proc/{target}/task")]
        is_traced = all(ptrace(0x4206, thread, None, None) == 0 for thread in threads)  # PTRACE_SEIZE
        for thread in threads:
            ptrace(0x4207, thread, None, None)  # PTRACE_INTERRUPT
        time.sleep(PAUSE_S)
        is_stopped = Path(f"/proc/{target}/stat").read_text().rpartition(")")[2].split()[0] == "t"
        os._exit(0 if is_traced and is_stopped else 1)  # its end lets the threads run
    finally:
        os._exit(2)


def sleeps(job: Job) -> None:
    time.sleep(PAUSE_S)


PAUSES: dict[str, Callable[[Job], None] | None] = {
    "nothing": None,
    "compiles": compiles,
    "evaluates": evaluates,
    "is debugged": is_debugged,
    "sleeps": sleeps,
    "saves slowly": None,
}


def pausing(rank: int, folder: str, what: str) -> tuple[list[list[float]], list[str]]:
    """The parameters in the end, and what was logged."""
    # 12 ranks run at the same time: on a busy machine a step takes some tenths of a second.
    fsdp2.safety(stall_after_s=1.0, answer_within_s=0.5)
    told: list[str] = []
    logging.getLogger("fsdp2").addHandler(Told(told, Path(folder) / "told"))
    job = Job(rank, Fault("none", victim=-1), folder)
    pause = PAUSES[what]
    for number in range(NUM_STEPS):
        if number == 2 and rank == 1 and pause is not None:
            pause(job)
        if number == 2 and what == "saves slowly":
            extra = {"slow": Slow(PAUSE_S * rank)}
            checkpoint.save(Path(folder) / "saved", model=job.model, extra=extra, timeout_s=60.0)
        job.step()
    torch.distributed.barrier()
    return [value.tolist() for value in job.values()], told


@pytest.mark.exhaustive
def test_pauses_are_no_faults(tmp_path: Path) -> None:
    """Compilation, a debugger, a slow save, an evaluation on one rank, a slow rank. Those that wait say so in the log;
    a save waits by itself, and says nothing."""
    folders = {what: tmp_path / what.replace(" ", "_") for what in PAUSES}
    for folder in folders.values():
        folder.mkdir()
    cases = [Case(pausing, 2, (str(folders[what]), what), limit_s=60.0) for what in PAUSES]
    found = dict(zip(PAUSES, run_cases(cases), strict=True))
    for what, outcomes in found.items():
        for outcome, undisturbed in zip(outcomes, found["nothing"], strict=True):
            assert outcome.ok, (what, outcome)
            assert outcome.value[0] == undisturbed.value[0], what
        told = [text for outcome in outcomes for text in outcome.value[1]]
        assert any("rank 1 is alive" in text for text in told) == (PAUSES[what] is not None), (what, told)
