"""What `fsdp2.plan` says, beside what happens on real ranks: see README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.plan.cases import CASES, TIMED, Case
from benchmarks.plan.ranks import on_ranks
from benchmarks.plan.truth import Truth, measure, step
from fsdp2.parallel import parallelize
from fsdp2.plan import Machine, Plan, predict
from fsdp2.plan.calibration import Node, calls_of, machine_of, medians, things, times_of
from fsdp2.plan.cost import Call

RESULTS = Path(__file__).parent / "results"
CPU = Machine("cpu", 2**34, {"float32": 1e11}, 1e10, 1e9, 1e9, is_accelerator=False)  # memory does not depend on rates
MIB = 2**20
CLOCKS = ("wall", "processor")
MEASURED = (
    *("flops", "memory_bandwidth", "link", "link_latency"),
    *("op_seconds", "dtensor_seconds", "unit_seconds", "overlap"),
)


def plan_of(case: Case, machine: Machine) -> Plan:
    return predict(case.workload, case.config, machine, case.ranks, **case.options)


# --- memory and communication -----------------------------------------------------------------------------------------


def counted(names: list[str]) -> list[Truth]:
    """On a rank."""
    warnings.simplefilter("ignore")
    return [measure(CASES[name]) for name in names]


def compare_counts(names: list[str]) -> dict[str, dict[str, Any]]:
    """Bytes and collectives of each case, planned and counted."""
    found = {}
    for ranks in sorted({CASES[name].ranks for name in names}):
        chosen = [name for name in names if CASES[name].ranks == ranks]
        for name, true in zip(chosen, on_ranks(ranks, counted, chosen)[0], strict=True):
            plan = plan_of(CASES[name], CPU)
            issued = [event for event in plan.rehearsal.events if event.group_size]
            sent = sum(nbytes for kind, nbytes in plan.sent.items() if kind != "tensor parallel")
            found[name] = {
                "ranks": ranks,
                "config": plan.name,
                "parameters": plan.rehearsal.num_params,
                "collectives": {"planned": len(issued), "counted": len(true.events), "same": issued == true.events},
                "sent": {"planned": sent, "counted": true.sent},
                "peak": {"planned": plan.peak.total, "counted": true.peak},
                "planned_peak_by_kind": dict(plan.peak.nbytes),
            }
    return found


def counts_table(found: Mapping[str, Any]) -> str:
    rows = []
    for name, each in found.items():
        peak, sent = each["peak"], each["sent"]
        collectives = each["collectives"]
        rows.append(
            [
                name,
                str(each["ranks"]),
                f"{each['parameters']:,}",
                f"{collectives['counted']}, {'the same' if collectives['same'] else 'OTHERS'}",
                f"{sent['counted']:,}",
                f"{sent['planned'] - sent['counted']:+,}" if sent["planned"] != sent["counted"] else "exact",
                f"{peak['counted'] / MIB:.2f}",
                f"{peak['planned'] / peak['counted'] - 1:+.2%}",
            ]
        )
    header = ["case", "ranks", "parameters", "collectives", "bytes sent", "planned", "peak, MiB", "planned"]
    return common.table(header, rows)


# --- time -------------------------------------------------------------------------------------------------------------


def timed(operators: Mapping[str, Call], name: str, rounds: int) -> dict[str, tuple[dict[str, float], list[float]]]:
    """On a rank, by each clock: what the parts of a plan take, and each real step, in the same rounds."""
    warnings.simplefilter("ignore")
    case, device = TIMED[name], torch.device("cpu")
    torch.manual_seed(0)
    model = parallelize(case.workload.build(), case.config, **case.options)
    optimizer = case.workload.optimizer(param for param in model.parameters() if param.requires_grad)
    batches = [case.workload.batch(case.workload.batch_size) for _ in range(case.workload.microbatches)]
    timed = {**things(device), "step": lambda: step(case, model, optimizer, batches)}
    found = times_of(timed, calls_of(operators, device), device, rounds)
    steps = found.pop("step")
    return {clock: (medians(found, device, clock), [getattr(took, clock) for took in steps]) for clock in CLOCKS}


def compare_times(names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step, planned on the machine as it was while the steps ran, and measured."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        case = TIMED[name]
        load = os.getloadavg()[0]
        by_clock = on_ranks(case.ranks, timed, plan_of(case, CPU).rehearsal.operators, name, rounds)[0]
        found[name] = {"ranks": case.ranks, "load": [load, os.getloadavg()[0]]}
        for clock, (seconds, steps) in by_clock.items():
            node = Node("this machine", CPU.memory, case.ranks, case.ranks)
            machine = machine_of(seconds, node, torch.device("cpu"))
            plan = plan_of(case, machine)
            found[name]["config"] = plan.name
            found[name][clock] = {
                "measured": steps,
                "planned": plan.seconds,
                "planned_without_operators": plan_of(case, replace(machine, operators={})).seconds,
                "planned_exposed": plan.rehearsal.exposed,
                "machine": {key: getattr(machine, key) for key in MEASURED},
            }
        print(times_table({name: found[name]}).splitlines()[-1], flush=True)
    return found


def times_table(found: Mapping[str, Any]) -> str:
    rows = []
    for name, each in found.items():
        row = [name]
        for clock in CLOCKS:
            spread = common.Spread.of(each[clock]["measured"])
            planned, rough = (each[clock][key] for key in ("planned", "planned_without_operators"))
            row += [spread.format(0, 1e3), f"{planned * 1e3:.0f}", f"{planned / spread.median - 1:+.0%}"]
            row.append(f"{rough / spread.median - 1:+.0%}")
        rows.append([*row, f"{max(each['load']):.1f}"])
    header = ["case", "step, ms", "planned", "error", "by rates alone", "processor, ms", "planned", "error"]
    return common.table([*header, "by rates alone", "load"], rows)


def tables() -> list[str]:
    """Those of README.md, from the results that are there."""
    made = {"counts": counts_table, "times": times_table}
    paths = [(kind, RESULTS / f"cpu_{kind}.json") for kind in made]
    return [made[kind](json.loads(path.read_text())[kind]) for kind, path in paths if path.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_size_options(parser)
    parser.add_argument("--of", choices=("counts", "times"), default="counts", help="what is compared")
    parser.add_argument("--cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument(
        "--show", action="store_true", help="print the tables of the results that are there, and no more"
    )
    parser.add_argument("--add", action="store_true", help="keep what the file has of other cases")
    parser.add_argument("--rounds", type=int, default=7, help="of times")
    few = {"cases": ["gpt"], "rounds": 3}
    dry = {"cases": ["experts"], "rounds": 1}
    options = common.apply_size_options(parser, few, dry)
    warnings.simplefilter("ignore")
    if options.show:
        print("\n\n".join(tables()))
        return
    if options.of == "counts":
        found = compare_counts(options.cases or list(CASES))
        shown = counts_table(found)
    else:
        found = compare_times(options.cases or list(TIMED), options.rounds)
        shown = times_table(found)
    path = common.out_path(options, RESULTS, f"cpu_{options.of}.json")
    provenance = on_ranks(2, common.provenance, "cpu")[0]
    for each in found.values():
        each["commit"] = provenance["versions"]["commit"]
    if options.add and path.exists():
        found = {**json.loads(path.read_text())[options.of], **found}
    result = {
        "question": "what a plan says, and what happens",
        "command": " ".join(["python", "-m", "benchmarks.plan.main", *sys.argv[1:]]),
        **provenance,
        options.of: found,
    }
    common.write_json(path, result)
    print(f"\n{shown}\n\nraw data: {path}")


if __name__ == "__main__":
    main()
