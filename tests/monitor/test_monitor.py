"""What a monitor writes is what happened: norms by unit, waits, throughput; by the libraries of those who show it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import sleep
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import clip_grad_norm_, fully_shard, step_in_backward
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.monitor import JsonLines, MLflow, Monitor, TensorBoard, WandB
from tests.helpers.ranks import on_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7)) for _ in range(3)], nn.Linear(7, 2))


def sharded() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 7)).square().sum().backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, 3)
def test_norms_of_units(rank: int, world_size: int, tmp_path: Path) -> None:
    """As one process computes them, of the clipped gradient; the total is that of the units; every second step is
    written, once."""
    model, optimizer = sharded()
    path = tmp_path / "deep" / "measured.jsonl"
    with Monitor(model, optimizer, [JsonLines(path)], every=2) as monitor:
        for step in range(1, 5):
            if step == 4:
                torch.manual_seed(step)
                alone = net()
                with torch.no_grad():
                    for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                        assert isinstance(theirs, DTensor)
                        mine.copy_(theirs.full_tensor())
            train(model, optimizer, step)
            written = monitor.step(step, tokens=100, loss=float(step))
            assert bool(written) == (step % 2 == 0)
    dist.barrier()
    torch.manual_seed(4)
    alone(torch.randn(4, 7)).square().sum().backward()
    clip_grad_norm_(alone.parameters(), 0.1)
    for name, module in (("0", alone[0]), ("2", alone[2]), ("root", alone[3])):
        squares = sum(param.grad.square().sum() for param in module.parameters() if param.grad is not None)
        assert written[f"grad_norm/{name}"] == pytest.approx(float(squares) ** 0.5, rel=1e-5)
    assert written["grad_norm"] == pytest.approx(0.1, rel=1e-4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4] and [line["loss"] for line in lines] == [2.0, 4.0]
    assert lines[1]["tokens_per_second"] == pytest.approx(100 / lines[1]["seconds"])
    assert lines[1]["memory_bytes"] > 2**20
    if rank == 0:
        assert lines[1] == {"step": 4, **written}


@on_ranks(2)
def test_waiting_is_exposed(rank: int, world_size: int) -> None:
    """One rank comes 0.2 s late to each step, and the other waits for it: 0.1 s on average."""
    model, optimizer = sharded()
    with Monitor(model, optimizer, every=3) as monitor:
        train(model, optimizer, 0)
        monitor.step(1)
        for step in (2, 3):
            sleep(0.2 * rank)
            train(model, optimizer, step)
            written = monitor.step(step)
    assert 0.1 * 2 / 3 * 0.9 < written["exposed_seconds"] < written["seconds"]
    assert "tokens_per_second" not in written


@on_ranks(2)
@pytest.mark.parametrize("is_called", [True, False])
def test_steps_in_backward(rank: int, world_size: int, is_called: bool) -> None:
    """Each unit is measured as backward steps it. The norm was that of the last one, or zero after the loop's own
    `optimizer.step()`, which finds no gradients."""
    measured = []
    for in_backward in (False, True):
        model, optimizer = sharded()
        if in_backward:
            step_in_backward(optimizer)
        with Monitor(model, optimizer, every=2) as monitor:
            for step in range(1, 5):
                torch.manual_seed(step)
                model(torch.randn(4, 7)).square().sum().backward()
                if is_called or not in_backward:
                    optimizer.step()
                    optimizer.zero_grad()
                written = monitor.step(step)
        measured.append({name: value for name, value in written.items() if name.startswith("grad_norm")})
    assert len(measured[0]) == 5 and measured[1].keys() == measured[0].keys()
    for name, value in measured[0].items():
        assert measured[1][name] == pytest.approx(value, rel=1e-6) and value > 0, name


@on_ranks(2)
def test_nothing_is_left_behind(rank: int, world_size: int) -> None:
    model, optimizer = sharded()
    with Monitor(model, optimizer) as monitor:
        train(model, optimizer, 0)
        monitor.step(1)
    train(model, optimizer, 1)
    assert not monitor.step(2).keys() & {"grad_norm"}
    with pytest.raises(ArgumentError, match="fully_shard first"):
        Monitor(net(), optimizer)
    with pytest.raises(ArgumentError, match="1 or more"):
        Monitor(model, optimizer, every=0)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UnsupportedError, match="pip install wandb"):
        WandB(project="p")


VALUES = {"seconds": 0.5, "grad_norm": 3.0, "grad_norm/layers.0": 2.0, "grad_norm/embed, head": 1.0}
IN_MLFLOW = {"seconds": 0.5, "grad_norm": 3.0, "grad_norm.layers.0": 2.0, "grad_norm.embed head": 1.0}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    writer.write(3, VALUES)
    writer.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in read.Scalars("grad_norm/layers.0")] == [(3, 2.0)]


def test_names_in_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its folders `grad_norm` was a file and, for `grad_norm/layers.0`, had to be a folder; and it refuses the comma
    in the name of a unit of several modules. Either ended training."""
    library = Mock()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    MLflow().write(3, VALUES)
    assert library.log_metrics.call_args.args == (IN_MLFLOW,)


@pytest.mark.exhaustive
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers databases now
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    writer = MLflow(run_name="r")
    writer.write(3, VALUES)
    writer.close()
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.data.metrics == IN_MLFLOW


@pytest.mark.exhaustive
def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    writer = WandB(project="p", mode="offline", dir=tmp_path)
    writer.write(3, VALUES)
    writer.write(4, {"more": 1.0})  # until then step 3 may get more
    assert {name: wandb.run.summary[name] for name in VALUES} == VALUES
    writer.close()
    assert list(tmp_path.rglob("*.wandb"))
