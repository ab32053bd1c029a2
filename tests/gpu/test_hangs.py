"""Collectives of NCCL that do not end: the watchdog sees them, the group is aborted, and every rank that lives gets the
error. Real processes, which are forked for one case each and share a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import nccl
from tests.helpers.fault_runs import NONE, WITH_DEFAULTS, check_all, run
from tests.helpers.faults import GOOD_STEPS, Fault

pytestmark = pytest.mark.gpu

FAULTS = [replace(fault, device="cuda") for fault in WITH_DEFAULTS]


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.what != "micro"], ids=lambda fault: fault.name)
def test_seconds(fault: Fault, tmp_path: Path) -> None:
    """With the default settings each fault is an error on each rank that lives, within ten seconds (asserted there)."""
    print(check_all([fault], tmp_path, nccl.__name__))


def test_another_number_of_microbatches(tmp_path: Path) -> None:
    """The rank that ran what it knows reduces the norm with what is gathered for the other one's next microbatch: NCCL
    compares nothing. It may make this one step, and gets the error then (docs/launching.md)."""
    fault = next(each for each in FAULTS if each.what == "micro")
    none = replace(NONE["fsdp"], device="cuda")
    found = run([none, fault], tmp_path, nccl.__name__)
    outcomes = found[fault.name]
    for outcome, right in zip(outcomes, found[none.name], strict=True):
        assert outcome.ok and right.ok, (outcome, right)
        assert outcome.value["values"][: GOOD_STEPS + 1] == right.value["values"][: GOOD_STEPS + 1]
        kind, text = outcome.value["error"]
        assert kind == "CollectiveError" and "did different things" in text, text
        assert outcome.value["steps"] in (GOOD_STEPS, GOOD_STEPS + 1) and outcome.value["seconds"] < 10
    print({fault.name: [round(outcome.value["seconds"], 1) for outcome in outcomes]})
