"""The thread that steps behind compute: how many threads it uses, and on which cores."""

import json
import os
from pathlib import Path

import pytest

from fsdp2.optim.background import cores_for
from tests.helpers.scripts import run_script

TELLS = """
import json, os, torch
from fsdp2.optim.background import submit

torch.set_num_threads(1)
before, found = os.sched_getaffinity(0), {}
for threads in (None, 1, 2):
    tell = lambda: found.update({str(threads): (torch.get_num_threads(), sorted(os.sched_getaffinity(0)))})
    submit(tell, threads).result()
assert os.sched_getaffinity(0) == before and torch.get_num_threads() == 1, "the caller's are as they were"
print(json.dumps(found))
"""


def test_cores() -> None:
    """The ranks of a machine share out its cores, and each keeps one for compute."""
    ranks = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    assert [cores_for(3, [*range(8)], rank) for rank in ranks] == [[5, 6, 7], [2, 3, 4]]
    assert cores_for(4, [*range(8)], ranks[0]) == []
    assert cores_for(1, [*range(8)], {}) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_and_cores_of_the_background(tmp_path: Path) -> None:
    """Bound to the last cores if the launcher says which rank this is, and if that leaves one for compute."""
    cores = sorted(os.sched_getaffinity(0))
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    known = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    job = run_script(script, environment=known)
    assert job.status == 0, job.errors
    two = cores[-2:] if len(cores) > 2 else cores
    assert json.loads(job.output) == {"None": [1, cores], "1": [1, cores[-1:]], "2": [2, two]}
