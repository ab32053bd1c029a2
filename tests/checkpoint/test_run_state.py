"""What a user and the generators of random numbers add to a checkpoint: it comes back as it was, on each rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp2 import ArgumentError, CheckpointError, checkpoint
from fsdp2.checkpoint import RandomState
from fsdp2.checkpoint.state import extra as extra_module
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_values_that_differ_between_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Everybody got those of the last rank."""
    with pytest.raises(CheckpointError, match=r"'n': ranks .* have different values"):
        checkpoint.save(tmp_path / "a", model={"n": rank})
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + rank))
    with pytest.raises(CheckpointError, match=r"optimizer options of 'weight'.*belongs to extra="):
        checkpoint.save(tmp_path / "b", model=layer, optimizer=optimizer)


def test_generators_come_back_last(tmp_path: Path) -> None:
    """An object that draws while it takes its state moved them."""

    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.rand(3)

    extra = {"random": checkpoint.RandomState(), "loader": Draws()}
    checkpoint.save(tmp_path / "a", extra=extra)
    wanted = torch.rand(4)
    checkpoint.load(tmp_path / "a", extra=extra)
    assert torch.equal(torch.rand(4), wanted)


def test_nested_dicts_of_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has a tensor inside, at 'weight'.* Flatten the dict"):
        checkpoint.save(tmp_path / "a", model={"model": nn.Linear(3, 2).state_dict()})


def test_how_deep_values_may_be_nested(tmp_path: Path) -> None:
    """Keys that are no strings take three levels of JSON, not two: what was saved could not be read."""

    def nested(depth: int) -> Any:
        return {0: nested(depth - 1)} if depth else "end"

    checkpoint.save(tmp_path / "a", extra={"deep": nested(30)})
    assert checkpoint.load(tmp_path / "a").extra["deep"] == nested(30)
    with pytest.raises(CheckpointError, match=r"nothing is saved.*nested more than 100 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": nested(38)})
    with pytest.raises(ArgumentError, match="nested more than 40 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": nested(42)})


def test_keys_of_extra_are_strings(tmp_path: Path) -> None:
    """1 and "1" were one."""
    with pytest.raises(ArgumentError, match="keys that are strings, got 1"):
        checkpoint.save(tmp_path / "a", extra={1: "a", "1": "b"})  # type: ignore[dict-item]


def test_random_state_that_not_all_ranks_gave() -> None:
    """A rank that gave none was asked for its generators."""
    drawn = []
    for rank in range(3):
        with pytest.warns(UserWarning, match="reseeds its generators"):
            RandomState().load_resharded([RandomState().state_dict(), None], rank, 3)
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 3


def test_steps_of_other_kinds(tmp_path: Path) -> None:
    """NumPy's failed after all had been written, and True made a checkpoint that could not be read."""
    checkpoint.save(tmp_path, model={"w": torch.ones(2)}, step=np.int64(3))  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path / "step-00000003", model={"w": torch.zeros(2)}).step == 3
    for step in (True, 2.0, "2"):
        with pytest.raises(ArgumentError, match="expected the number of steps done"):
            checkpoint.save(tmp_path, model={"w": torch.ones(2)}, step=step)  # type: ignore[arg-type]


def test_extra_state_is_hashed_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread waited a quarter of a second for 400 MB of a data loader's state. What changes after the call
    is not what is saved."""
    threads, real = [], extra_module._digest
    monkeypatch.setattr(
        extra_module, "_digest", lambda *args: (threads.append(threading.current_thread().name), real(*args))[1]
    )
    order = torch.arange(1000)
    pending = checkpoint.save(tmp_path / "a", extra={"loader": {"order": order}}, async_op=True)
    order.zero_()
    pending.wait()
    assert threads == ["fsdp2-save"]
    assert checkpoint.load(tmp_path / "a").extra["loader"]["order"].tolist() == list(range(1000))
