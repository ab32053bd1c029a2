"""Runs of faults, and what must come of them: an error with a name on every rank that lives, within seconds, and no
parameter stepped with anything wrong (docs/launching.md). Real processes, which are forked for one fault each."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsdp2
from fsdp2.watch.watchdog import watchdog
from tests.helpers.faults import GOOD_STEPS, Fault, Job, Told
from tests.helpers.mortal_ranks import Case, Outcome, run_cases

__all__ = ["LIMIT_S", "NONE", "SAYS", "WITH_DEFAULTS", "check", "check_all", "run"]

LIMIT_S = 60.0  # a busy machine
WITH_DEFAULTS = [
    Fault(what, default=True) for what in ("kill", "stop", "raise", "leave", "destroy", "order", "skip", "micro")
] + [Fault("order", mesh="hsdp", ranks=4, victim=2, also=(3,), default=True)]


def body(rank: int, fault: Fault, folder: str) -> dict[str, Any]:
    if fault.what == "off":
        fsdp2.safety(False)
    elif not fault.default:
        fsdp2.safety(stall_after_s=0.5)
    os.chdir(folder)
    told: list[str] = []
    logging.getLogger("fsdp2").addHandler(Told(told, Path(folder) / "reported"))
    job = Job(rank, fault, folder)
    history = [job.values()]
    error: BaseException | None = None
    try:
        for number in range(GOOD_STEPS + 2):
            job.is_bad = rank in (fault.victim, *fault.also) and number == (0 if fault.first else GOOD_STEPS)
            job.step()
            history.append(job.values())
        torch.distributed.barrier()
    except Exception as raised:
        error = raised
    ended = time.time()
    if error is not None:
        job.model.reset_iter_state()
    dog = watchdog()
    has_left = rank == fault.victim and fault.what == "destroy"
    assert (dog is None) == (fault.what == "off" or has_left)
    if error is not None and rank == fault.victim and fault.what == "raise":
        sys.last_value = error  # as where nobody catches it
    if dog is not None:
        dog.close()
    begun = Path(folder, "fault").read_text().split() if Path(folder, "fault").exists() else ["0", "0"]
    if fault.what == "stop" and rank == (fault.victim + 1) % fault.ranks:
        time.sleep(1.0)
        os.kill(int(begun[0]), signal.SIGKILL)
    return {
        "error": None if error is None else (type(error).__name__, str(error)),
        "told": told,
        "seconds": ended - float(begun[1]),
        "steps": job.num_steps,
        "values": [[each.tolist() for each in values] for values in [*history, job.values()]],
    }


def run(faults: list[Fault], folder: Path, module: str = "") -> dict[str, list[Outcome]]:
    folders = {}
    for fault in faults:
        folders[fault.name] = folder / fault.name
        folders[fault.name].mkdir(parents=True)
    cases = [Case(body, each.ranks, (each, str(folders[each.name])), limit_s=LIMIT_S, device=module) for each in faults]
    outcomes = run_cases(cases)
    return {each.name: found for each, found in zip(faults, outcomes, strict=True)}


def check(fault: Fault, outcomes: list[Outcome], right: list[Outcome]) -> None:
    """Every rank that lives got an error that says what happened; no rank stepped with anything that was not right."""
    dead = fault.victim if fault.what in ("kill", "stop") else None
    if fault.what in ("sleep", "off"):
        for outcome, other in zip(outcomes, right, strict=True):
            assert outcome.ok and outcome.value["error"] is None, outcome
            assert outcome.value["values"] == other.value["values"]
        waited = [text for outcome in outcomes for text in outcome.value["told"]]
        late = f"rank {fault.victim} is alive but has not arrived"
        assert fault.what == "off" or any(late in text for text in waited)
        return
    if fault.what == "leave" and fault.where != "save":
        # It ends once the first rank has been warned; others may not have waited for long by then.
        warned = [
            told for outcome in outcomes for told in outcome.value["told"] if "is alive but has not arrived" in told
        ]
        assert any("faults.py" in told for told in warned), (fault.name, warned)
    explained = []
    for rank, outcome in enumerate(outcomes):
        if rank == dead:
            assert outcome.how == "died", (fault.name, outcome)
            continue
        assert outcome.ok, (fault.name, rank, outcome)
        result = outcome.value
        kind, text = result["error"] or ("", "")
        if fault.what in ("raise", "leave", "destroy") and rank == fault.victim:
            assert kind in ("ValueError", "Left", "CheckpointError")
        elif fault.where == "save":
            assert kind == "CheckpointError" and str(fault.victim) in text, (fault.name, rank, result["error"])
            assert result["seconds"] < 30, (fault.name, rank, result["seconds"])
        elif fault.mesh == "tp" and kind == "RuntimeError":
            assert (
                "gloo" in text or "pair closure" in text
            )  # it was in a collective of torch's tensor parallelism, which knows no units
            assert result["seconds"] < 30, (fault.name, rank, result["seconds"])
        else:
            explained.append(rank)
            assert kind == "CollectiveError", (fault.name, rank, result["error"])
            for expected in SAYS[fault.what](fault):
                assert expected in text, (expected, text)
            assert any(f"rank {bad}" in text for bad in (fault.victim, *fault.also)), text
            limit_s = 10 if fault.default else 30  # the others run many at a time
            assert result["seconds"] < limit_s, (fault.name, rank, result["seconds"])
        good = right[rank].value["values"]
        steps = result["steps"]
        assert steps in (0, 1) if fault.first else steps in (GOOD_STEPS, GOOD_STEPS + 1), (fault.name, rank, steps)
        for number, values in enumerate(result["values"][: steps + 1]):
            assert values == good[number], f"{fault.name}: rank {rank} was stepped wrongly before step {number}"
        has_stepped = fault.where == "optimizer" and rank == fault.victim  # and raised before that was counted
        assert result["values"][-1] == good[steps + has_stepped], f"{fault.name}: rank {rank} was stepped wrongly"
    assert explained or fault.where == "save"


SAYS: dict[str, Callable[[Fault], list[str]]] = {
    "order": lambda fault: ["did different things", "blocks.0", "blocks.1"],
    "skip": lambda fault: ["did different things", "blocks.1", "blocks.2"],
    # Beside tensor parallelism norms are reduced over all ranks: another group, in which no entry differs.
    "micro": lambda fault: [
        "wait for each other" if fault.mesh == "tp" else "did different things",
        "all-reduce of norms",
        "all-gather",
        f"{fault.victim}",
    ],
    "kill": lambda fault: [f"rank {fault.victim} was killed"],
    "stop": lambda fault: [f"rank {fault.victim} is stopped"],
    "raise": lambda fault: [f"rank {fault.victim} has ended after ValueError: a bad batch"],
    "leave": lambda fault: [f"rank {fault.victim} has ended"],
    "destroy": lambda fault: [f"rank {fault.victim} has destroyed its process groups"],
}

NONE = {
    mesh: Fault("none", mesh=mesh, ranks=ranks, victim=0)
    for mesh, ranks in (("fsdp", 2), ("hsdp", 4), ("tp", 4), ("fsdp4", 4))
}
NONE["fsdp4"] = replace(NONE["fsdp4"], mesh="fsdp")


def right_for(fault: Fault) -> Fault:
    none = NONE["fsdp4" if fault.mesh == "fsdp" and fault.ranks == 4 else fault.mesh]
    return replace(none, device=fault.device)


def check_all(faults: list[Fault], folder: Path, module: str = "") -> dict[str, list[float]]:
    """Run faults, and check what comes of each.

    Args:
        module: of the accelerator, for faults with another device than the CPU.

    Returns:
        For each the seconds from the fault to the error, of the ranks that live.
    """
    rights = list({right_for(fault).name: right_for(fault) for fault in faults}.values())
    found = run([*rights, *faults], folder, module)
    for right in rights:
        for outcome in found[right.name]:
            assert outcome.ok and outcome.value["error"] is None, outcome
    for fault in faults:
        check(fault, found[fault.name], found[right_for(fault).name])
    return {
        fault.name: [round(outcome.value["seconds"], 1) for outcome in found[fault.name] if outcome.ok]
        for fault in faults
    }
