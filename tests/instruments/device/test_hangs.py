"""Collectives that do not end on a device whose waits do not block the process, as NCCL's: the watchdog sees them, the
group is aborted, and every rank that lives gets the error. Real processes, which are forked for one case each.

As most loops, that of `Job` reads the norm of the gradients before it steps. One that reads nothing runs ahead of its
device: what it has queued behind a collective that is aborted is computed with garbage, and must not be saved.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2 import checkpoint
from fsdp2.watch.watchdog import watchdog
from tests.helpers.fault_runs import LIMIT_S, WITH_DEFAULTS, check_all
from tests.helpers.faults import Fault, Told, build
from tests.helpers.mortal_ranks import Case, Outcome, run_cases
from tests.instruments.device import comparing, lagging
from tests.instruments.device.ranks import DEVICE

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(lagging.compiler() is None, reason="the lagging device needs a C++ compiler"),
]

PLACES = ["forward", "reduction", "step", "between"]
MATRIX = [
    Fault("order", first=True, device=DEVICE),
    Fault("sleep", "between", device=DEVICE),
    Fault("order", mesh="hsdp", ranks=4, victim=2, also=(3,), device=DEVICE),
    *(
        Fault(what, where, mesh, ranks, victim, device=DEVICE)
        for mesh, ranks, victim in (("fsdp", 2, 0), ("hsdp", 4, 1))
        for what in ("kill", "stop", "raise", "leave")
        for where in PLACES
    ),
]


def test_seconds(tmp_path: Path) -> None:
    """With the default settings each kind is an error on each rank that lives, within ten seconds (asserted there)."""
    faults = [replace(fault, device=DEVICE) for fault in WITH_DEFAULTS]
    print(check_all(faults, tmp_path, comparing.__name__))


@pytest.mark.parametrize("ranks", [2, 4])
def test_fault_matrix(ranks: int, tmp_path: Path) -> None:
    check_all([fault for fault in MATRIX if fault.ranks == ranks], tmp_path, comparing.__name__)


class Loop:
    """Training that does not wait for its device."""

    def __init__(self, ranks: int = 2) -> None:
        self.model = build("fsdp", ranks, DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(4, 8, device=DEVICE)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[list[float]]:
        return [param.to_local().cpu().tolist() for param in self.model.parameters()]


def run(body: Callable[..., Any], folder: Path, *args: Any) -> list[Outcome]:
    return run_cases([Case(body, 2, (str(folder), *args), limit_s=LIMIT_S, device=comparing.__name__)])[0]


def listen(folder: str) -> list[str]:
    """What the library will have logged."""
    fsdp2.safety(stall_after_s=0.3)
    told: list[str] = []
    logging.getLogger("fsdp2").addHandler(Told(told, Path(folder) / "told"))
    return told


def busy(rank: int, folder: str, what: str) -> tuple[list[list[float]], list[str]]:
    told = listen(folder)
    loop = Loop()
    for _ in range(2):
        loop.step()
    if what in (f"rank {rank}", "both"):
        lagging.occupy(2.0)
    loop.step()
    if what == f"rank {rank}":
        time.sleep(1.0)  # less far than the other one, but in time for its device
    for _ in range(3):
        loop.step()
    values = loop.values()
    dog = watchdog()
    assert dog is not None and dog.num_rounds >= (what != "nobody") and dog.failure is None
    torch.distributed.barrier()
    return values, told


@pytest.mark.parametrize("what", ["rank 0", "rank 1", "both"])
def test_a_busy_device_is_no_fault(what: str, tmp_path: Path) -> None:
    """A computation of many times `stall_after_s` comes before a collective, and the processes run ahead of it by
    different numbers of steps: they are asked what they do, and nothing is reported."""
    (tmp_path / "nobody").mkdir()
    right = run(busy, tmp_path / "nobody", "nobody")
    for outcome, other in zip(run(busy, tmp_path, what), right, strict=True):
        assert outcome.ok and other.ok, (outcome, other)
        assert outcome.value == (other.value[0], []), outcome.value[1]


def ends_behind(rank: int, folder: str) -> str:
    """Rank 1 ends with an all-gather on its device's queue."""
    listen(folder)
    loop = Loop()
    loop.step()
    loop.values()
    torch.distributed.barrier()
    if rank == 1:
        lagging.occupy(60.0)
    handle = loop.model.blocks[0].unshard(async_op=True)
    if rank == 1:
        dog = watchdog()
        assert dog is not None
        dog.close("has ended")
        return ""
    handle.wait()
    float(loop.model.blocks[0].up.weight.sum())  # returns when the group has been aborted
    with pytest.raises(fsdp2.CollectiveError) as caught:
        loop.step()
    return str(caught.value)


def test_a_rank_that_ends_before_its_device(tmp_path: Path) -> None:
    """It has made all that rank 0 waits for, as far as its process knows; its device has not."""
    outcomes = run(ends_behind, tmp_path)
    assert outcomes[0].ok and "rank 1 has ended" in outcomes[0].value, outcomes
    assert "rank 0 waits for all-gather of unit 'blocks.0'" in outcomes[0].value


def runs_ahead(rank: int, folder: str) -> tuple[list[list[float]], list[str], str]:
    """Rank 1 runs units in another order after some steps; rank 0 knows its own and does not wait."""
    listen(folder)
    os.chdir(folder)
    loop = Loop()
    errors = []
    for number in range(8):
        if number == 4 and rank == 1:
            loop.model.order = [1, 0, 2]
        try:
            loop.step()
        except fsdp2.CollectiveError as error:
            errors.append(str(error))
            break
    loop.model.reset_iter_state()
    loop.values()  # rank 0 has queued all of its steps by now
    for call in (loop.step, loop.optimizer.step):
        with pytest.raises(fsdp2.CollectiveError) as caught:
            call()
        errors.append(str(caught.value))
    with pytest.raises(fsdp2.CheckpointError) as refused:
        checkpoint.save("run", model=loop.model, optimizer=loop.optimizer, step=4, timeout_s=20.0)
    return loop.values(), errors, str(refused.value)


def test_what_ran_ahead_is_not_saved(tmp_path: Path) -> None:
    """All ranks live and could save; what rank 0 queued behind the all-gather of another unit is worth nothing."""
    outcomes = run(runs_ahead, tmp_path)
    for outcome in outcomes:
        assert outcome.ok, outcome
        _, errors, refused = outcome.value
        assert len(errors) >= 2 and all("ranks did different things" in error for error in errors), errors
        assert "values may be wrong" in refused and "blocks.1" in refused
    assert not list(tmp_path.glob("run/*/*.safetensors"))
