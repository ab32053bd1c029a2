"""What `compare` says of plans with tensor parallelism, and the device that a rank measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.plan.cases import TENSOR_PLAN, Mlps, square
from fsdp2.parallel import ParallelConfig
from fsdp2.plan import MACHINES, Comparison, Workload, cli, predict


def test_the_gain_over_tensor_parallelism() -> None:
    """Ranks of a tensor-parallel group share their tokens. A plan that is 40 % faster without it was said to lose
    30 %."""
    workload = Workload(lambda: Mlps(32, depth=2), lambda size: torch.ones(size, 32), square, optimizer=torch.optim.SGD)
    one, two = (
        predict(workload, ParallelConfig(tensor=tensor), MACHINES["h100"], 2, tp_plan=TENSOR_PLAN) for tensor in (1, 2)
    )
    faster = replace(one, rehearsal=replace(two.rehearsal, tokens=0.7 * two.rehearsal.tokens))
    comparison = Comparison(two, [faster, two], [])
    assert "+40%" in comparison.advice and "+40%" in comparison.line


def test_a_rank_measures_its_own_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ranks of a node measured the first one."""
    order: list[Any] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", order.append)
    monkeypatch.setattr(dist, "init_process_group", lambda: order.append("process group"))
    monkeypatch.setattr(cli, "calibrate", lambda operators, name: MACHINES["h100"])
    assert cli.main(["calibrate", str(tmp_path / "machine.json")]) == 0
    assert order == [1, "process group"]
