"""How close is `fsdp2.plan` to what happens on real ranks? Results: README.md."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.plan.cases import CASES, Case
from benchmarks.plan.ranks import on_ranks
from benchmarks.plan.truth import Truth, measure
from fsdp2.plan import Machine, Plan, predict

RESULTS = Path(__file__).parent / "results"
CPU = Machine("cpu", 2**34, {"float32": 1e11}, 1e10, 1e9, 1e9, is_accelerator=False)  # memory does not depend on rates
MIB = 2**20


def plan_of(case: Case, machine: Machine) -> Plan:
    return predict(case.workload, case.config, machine, case.ranks, **case.options)


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
            issued = [event for event in plan.events if event.group_size]
            sent = sum(nbytes for kind, nbytes in plan.sent.items() if kind != "tensor parallel")
            found[name] = {
                "ranks": ranks,
                "config": plan.name,
                "parameters": plan.num_params,
                "collectives": {"planned": len(issued), "counted": len(true.events), "same": issued == true.events},
                "sent": {"planned": sent, "counted": true.sent},
                "peak": {"planned": plan.peak.total, "counted": true.peak},
                "planned_peak_by_kind": dict(plan.peak.nbytes),
            }
    return found


def counts_table(found: Mapping[str, Any], omit_exact: bool = False) -> str:
    rows, exact = [], 0
    for name, each in found.items():
        peak, sent = each["peak"], each["sent"]
        collectives = each["collectives"]
        planned = [
            "exact" if collectives["same"] else "OTHERS",
            f"{sent['planned'] - sent['counted']:+,}" if sent["planned"] != sent["counted"] else "exact",
            f"{peak['planned'] / peak['counted'] - 1:+.2%}" if peak["planned"] != peak["counted"] else "exact",
        ]
        if omit_exact and set(planned) == {"exact"}:
            exact += 1
            continue
        counted = [str(collectives["counted"]), f"{sent['counted']:,}", f"{peak['counted'] / MIB:.2f}"]
        pairs = zip(counted, planned, strict=True)
        rows.append([name, str(each["ranks"]), *(cell for pair in pairs for cell in pair)])
    if exact:
        rows.append([f"{exact} others", "", *["", "exact"] * 3])
    header = ["case", "ranks", "collectives", "planned", "bytes sent", "planned", "peak, MiB", "planned"]
    return common.table(header, rows)


def tables() -> list[str]:
    """Those of README.md, from the results that are there: cases that are planned exactly share one row."""
    return [counts_table(json.loads((RESULTS / "cpu_counts.json").read_text())["counts"], omit_exact=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_size_options(parser)
    parser.add_argument("--cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--show", action="store_true", help="only print the tables of the results that are there")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other cases")
    options = common.apply_size_options(parser, {"cases": ["gpt"]}, {"cases": ["experts"]})
    warnings.simplefilter("ignore")
    if options.show:
        print("\n\n".join(tables()))
        return
    found = compare_counts(options.cases or list(CASES))
    shown = counts_table(found)
    path = common.out_path(options, RESULTS, "cpu_counts.json")
    provenance = on_ranks(2, common.provenance, "cpu")[0]
    for each in found.values():
        each["commit"] = provenance["versions"]["commit"]
    if options.add and path.exists():
        found = {**json.loads(path.read_text())["counts"], **found}
    result = {
        "question": "what a plan says, and what happens",
        "command": " ".join(["python", "-m", "benchmarks.plan.main", *sys.argv[1:]]),
        **provenance,
        "counts": found,
    }
    common.write_json(path, result)
    print(f"\n{shown}\n\nraw data: {path}")


if __name__ == "__main__":
    main()
